# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Which nodes, and how many processes on each, where the user names them: node rank 0 comes first.

# The way of the scripts that are given the nodes.
launch_on_nodes() { # <argument...>
  OPTIONS+=(["-f"]=hostfile)
  parse_arguments "config nproc nodes..." "$@"
  require_tools
  choose_python
  plan_nodes
  launch
}

# From the words in NODES to what ssh calls each node, and RANKS, by node rank.
plan_nodes() {
  local words=("${NODES[@]}") word name number names
  [[ -z ${plan[hostfile]:-} ]] || read_hostfile
  ((${#words[@]})) || die 2 "no nodes; usage: $(usage_line)"
  : "${plan[nproc]=${NPROC_PER_NODE:-}}"
  [[ ${plan[nproc]} == auto ]] || require_number "the number of processes" "${plan[nproc]}" 1 4096
  NODES=()
  for word in "${words[@]}"; do
    name=$word number=${plan[nproc]}
    if [[ $word =~ ^([^:]*@)?\[([^]]*:[^]]*)\](:(.+))?$ ]]; then # [IPv6]:4
      name=${BASH_REMATCH[1]}${BASH_REMATCH[2]} number=${BASH_REMATCH[4]:-$number}
    elif [[ $word != *:*:* && $word == *:* ]]; then
      name=${word%:*} number=${word##*:}
    fi
    [[ $name =~ ^[^-[:space:]] ]] || die 2 "${word@Q} names no node; give NODE, NODE:NPROC or a list such as gpu[01-08]"
    [[ $number == auto ]] || require_number "the number of processes of ${word@Q}" "$number" 1 4096
    [[ $name != *[]\[,]* ]] || name=$(run_ours distributed.hostlist expand "$name" 2>&1) ||
      die 2 "${name#hostlist: }; correct it"
    mapfile -t names <<<"$name"
    for name in "${names[@]}"; do NODES+=("$name") RANKS+=("$number"); done
  done
  plan[nnodes]=${#NODES[@]}
  ((plan[nnodes] == 1)) || plan[master]=${MASTER_ADDR:-${NODES[0]##*@}}
}

# A node a line, as on the command line, or as Open MPI has it: `node1 slots=4`.
read_hostfile() {
  local file=${plan[hostfile]} line fields number=0 slots='(max[-_]slots=[0-9]+ )?slots=([0-9]+)( max[-_]slots=[0-9]+)?'
  [[ -r $file && ! -d $file ]] || die 2 "there is no file ${file@Q} of hosts; correct -f"
  while IFS= read -r line || [[ -n $line ]]; do
    ((number += 1))
    line=${line%%#*}
    read -ra fields <<<"${line%$'\r'}"
    if ((${#fields[@]} < 2)); then
      words+=("${fields[@]}")
    elif [[ ${fields[*]} =~ ^([^ ]+)\ $slots$ ]]; then
      words+=("${BASH_REMATCH[1]}:${BASH_REMATCH[3]}")
    else
      die 2 "line $number of ${file@Q} is ${line@Q}; give NODE, NODE:NPROC or NODE slots=NPROC, one a line"
    fi
  done <"$file"
  ((${#words[@]})) || die 2 "${file@Q} names no node; give one a line"
}

# In a PBS job: its nodes, and on each as many processes as the node file has lines for it.
plan_from_nodefile() {
  local name number
  [[ -n ${PBS_JOBID:-} && -r ${PBS_NODEFILE:-} ]] || die 2 "this is no PBS job; use qsub $0"
  while read -r number name; do
    ((number > 1)) || number=auto
    NODES+=("$name:${plan[nproc]-${NPROC_PER_NODE:-$number}}")
  done < <(awk '{ if (!seen[$1]++) order[++n] = $1 } END { for (i = 1; i <= n; i++) print seen[order[i]], order[i] }' "$PBS_NODEFILE")
  : "${plan[nproc]=auto}"
  plan_nodes
}
