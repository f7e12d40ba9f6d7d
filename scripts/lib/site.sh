# shellcheck shell=bash disable=SC2154 # of launch.sh
# The cluster's own settings: config/site.env, or the file that SITE names.

# Exports the file's variables that the user has not set; adds to KIT_ACTIVATED, sets KIT_SITE_ROW.
read_site() {
  [[ -z ${SITE:-} || -r $SITE ]] || ! ignore_foreign SITE "which is not a file" || unset SITE
  local file=${SITE-$KIT_ROOT/config/site.env} line name value number=0 names=()
  [[ -n $file && (-e $file || $file == "${SITE:-}") ]] || return 0
  [[ -r $file && ! -d $file ]] ||
    die 2 "SITE names ${file@Q}, which cannot be read; correct its path [config-invalid]"

  while read -r line || [[ -n $line ]]; do
    number=$((number + 1)) line=${line#$'\xef\xbb\xbf'} line=${line%$'\r'} # from a Windows editor
    [[ -n $line && $line != \#* ]] || continue
    matches "${line#export }" '^([A-Za-z_][A-Za-z0-9_]*)=(.*)$' ||
      die 2 "$file, line $number: ${line@Q} sets nothing; write NAME=VALUE [config-invalid]"
    name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
    case $value in \"*\" | \'*\') value=${value:1:-1} ;; esac
    [[ -z ${!name+set} ]] || continue
    export "$name=$value"
    names+=("$name")
  done <"$file"
  KIT_ACTIVATED+=("${names[@]}")
  KIT_SITE_ROW="$file sets ${names[*]:-nothing that is not set already}"
}

# [a-z] means the ASCII letters in every locale.
matches() { # <text> <regular expression>
  local LC_ALL=C
  [[ $1 =~ $2 ]]
}
