#!/bin/sh
# Compile a text, look at the result, check it, and compare it with a smaller copy. Nothing leaves this machine:
#
#     sh examples/publish.sh MODEL TEXTFILE DIR
#
# MODEL is a folder with a small model, or one on the Hub. The last line shows how to publish.
set -eu
model=$1 text=$2 dir=$3

editable-cache precompile "$model" "$text" -o "$dir/policy" --name policy
editable-cache precompile "$model" "$text" -o "$dir/policy-int8" --name policy --storage int8
editable-cache inspect "$dir/policy" --model "$model"
editable-cache verify "$dir/policy" --model "$model" --tokens 16

# Exit code 1 says that they differ, as they must: the second one is rounded to 8 bits.
code=0
editable-cache diff "$dir/policy" "$dir/policy-int8" || code=$?
test "$code" -eq 1

echo "publish it with: editable-cache push $dir/policy organization/name"
