#!/usr/bin/env bash
# Regenerates nightshift/wire/v1 from the .proto files: proto/generate.sh [OUT], default OUT is the repository.
# grpcio-tools is pinned to the oldest protobuf generation of the locks: newer runtimes read older code, not the reverse.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/..}
python=${PYTHON:-python3}
mkdir -p "$out/nightshift/wire/v1"
"$python" -m grpc_tools.protoc -I "$here" \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  "$here"/nightshift/wire/v1/*.proto
