# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out to this machine alone: it starts this node's agent and becomes it.
#
# A fan-out is one file with these functions:
#   fanout_check   the preflight on every node; completes the plan
#   fanout_print   each node's ranks and command, ready to paste
#   fanout_start   starts every node's agent; the script ends with their exit code

fanout_check() {
  local facts
  preflight_command --node-rank "${plan[node_rank]}"
  facts=$("${COMMAND[@]}") || exit
  read_facts "$facts"
  plan[checked_nodes]=1
}

fanout_print() {
  local first=$((plan[node_rank] * plan[nproc]))
  place_node
  printf '# node %s (%s): ranks %s-%s of %s, rendezvous %s:%s\n' "${plan[node_rank]}" "$HOST" \
    "$first" $((first + plan[nproc] - 1)) $((plan[nnodes] * plan[nproc])) "${plan[master]}" "${plan[port]}"
  echo "cd $(quote_line "$PWD") && $(quote_line "${COMMAND[@]}")"
}

fanout_start() {
  place_node
  exec "${COMMAND[@]}"
}

place_node() {
  node_command --nnodes "${plan[nnodes]}" --node-rank "${plan[node_rank]}" --master-addr "${plan[master]}"
}
