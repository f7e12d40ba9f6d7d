# shellcheck shell=bash disable=SC2034,SC2154 # of launch.sh
# The cluster's own settings: config/site.env, or the file that SITE names.

# Sets and exports what the file gives, but for what the user has set; adds the names to ACTIVATED,
# and the row of the plan.
read_site() {
  local file=${SITE-$ROOT/config/site.env} line name value number=0 names=()
  [[ -z ${SITE:-} || -r $SITE ]] || ! ignore_foreign SITE "which is no file" || file=$ROOT/config/site.env
  [[ -n $file && (-e $file || $file == "${SITE:-}") ]] || return 0
  [[ -r $file ]] || die 2 "SITE names ${file@Q}, which cannot be read; correct its path [config-invalid]"
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1)) line=${line#$'\xef\xbb\xbf'} line=${line%$'\r'} # Windows puts them there
    [[ -n $line && $line != \#* ]] || continue
    matches "${line#export }" '^([A-Za-z_][A-Za-z0-9_]*)=(.*)$' ||
      die 2 "$file, line $number: ${line@Q} sets nothing; write NAME=VALUE [config-invalid]"
    name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
    case $value in \"*\" | \'*\') value=${value:1:-1} ;; esac
    [[ -z ${!name+set} ]] || continue
    export "$name=$value"
    names+=("$name")
  done <"$file"
  ACTIVATED+=("${names[@]}")
  SITE_ROW="$file sets ${names[*]:-nothing that is not set already}"
}

# In any language, [a-z] are the letters of C.
matches() { # <text> <regular expression>
  local LC_ALL=C
  [[ $1 =~ $2 ]]
}
