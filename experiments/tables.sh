#!/usr/bin/env bash
# Runs the rows of tables, one at a time on each GPU, and puts the tables together.
#
#   experiments/tables.sh GPUS FOLDER [TABLE...] [-- OPTION...]
#
# TABLE is e2e, subgraphs, resnet, ops or ablations; all by default. OPTIONs go to each of them, such
# as --engines DIR or --quick. What is in FOLDER already is not run again.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=$1 folder=$2
shift 2
tables=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  tables+=("$1")
  shift
done
[ $# -eq 0 ] || shift
[ ${#tables[@]} -gt 0 ] || tables=(e2e subgraphs resnet ops ablations)
mkdir -p "$folder/rows"

rows() { # "TABLE ROW" a line
  python -c 'import importlib, sys
for table in sys.argv[1:]:
    for row in importlib.import_module(f"experiments.{table}").ROWS:
        print(table, row.name)' "$@"
}

one() { # FOLDER [OPTION...] TABLE ROW
  local folder=$1 table=${*: -2:1} row=${*: -1}
  local options=("${@:2:$#-3}") file="$1/rows/$table-$row"
  CUDA_VISIBLE_DEVICES=$SLOT python -m "experiments.$table" "$file.jsonl" --rows "$row" \
    "${options[@]}" >"$file.log" 2>&1 || true
  echo "$table $row: $(wc -l <"$file.jsonl") lines"
}
export -f one

rows "${tables[@]}" |
  xargs -n 2 -P "$gpus" --process-slot-var=SLOT bash -c 'one "$@"' one "$folder" "$@"

for table in "${tables[@]}"; do
  cat "$folder"/rows/"$table"-*.jsonl >"$folder/$table.jsonl"
  python -m "experiments.$table" "$folder/$table.jsonl" --report "$@" >"$folder/$table.log"
  echo "wrote $folder/$table.md"
done
