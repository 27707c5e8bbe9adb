#!/bin/bash
# Builds all extension modules and holds the CUDA backend against the CPU backend through the Python engine and
# `ds4 logits`, on random models of both families and on every model in the folder MODELS. Needs nvcc, g++ and one GPU,
# and the Python packages that ds4 and its build need; DEPS names a folder with those that are not installed. No network.
#
#   tests/gpu/run_python.sh                         random models only
#   MODELS=models DEPS=deps tests/gpu/run_python.sh
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT" build/gpu/models
export PYTHONPATH=.${DEPS:+:$DEPS} DS4_CUDA=1
start=$(date +%s)
python3 setup.py -q build_ext --inplace >"$OUT/build_python.log" 2>&1 ||
  { tail -40 "$OUT/build_python.log"; exit 3; }
echo "built in $(($(date +%s) - start)) s with $(nproc) cores"
ds4() { python3 -c 'import sys; from ds4.cli.main import main; sys.exit(main())' "$@"; }
ds4 --backends || exit 1
for family in llama deepseek4; do
  ds4 synth "build/gpu/models/$family.gguf" --family "$family" --force || exit 1
done
failed=0
for model in build/gpu/models/*.gguf ${MODELS:+"$MODELS"/*.gguf}; do
  python3 tests/gpu/compare_backends.py "$model" --out "$OUT" || failed=1
done
exit $failed
