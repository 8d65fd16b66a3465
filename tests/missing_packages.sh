#!/usr/bin/env bash
# Prints the Debian packages that the C++ tests, the tokenizers and liger-train are built with and this machine lacks, one per line. Where there
# is no dpkg, CMake says what it has not found.
set -euo pipefail
command -v dpkg-query >/dev/null || exit 0
for package in libgtest-dev libpcre2-dev libutf8proc-dev libcli11-dev libgloo-dev; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
done
