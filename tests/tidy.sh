#!/usr/bin/env bash
# clang-tidy on one file: tidy.sh <python> <build folder> <file>.
set -euo pipefail
torch=$("$1" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")/include
system=("$torch" "$torch/torch/csrc/api/include" "$2"/{pcre2,gloo} build/sources/{json,utf8proc,cli11,gloo}-*/{,include,single_include})
exec "${TIDY:-build/lint/bin/clang-tidy}" --quiet "$3" -- -std=c++20 -I. -I"$2/include" "${system[@]/#/-isystem}" -DPCRE2_STATIC -DLIGER_GLOO
