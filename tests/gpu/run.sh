#!/bin/bash
# Builds gpu_check and runs it: checks first, timings and the table last. Needs nvcc, g++, make and one GPU; no Python,
# no network. Arguments go to gpu_check; OUT names the folder for the log and the CSV.
#
#   tests/gpu/run.sh                      everything (about five minutes on sixteen cores and an H200)
#   tests/gpu/run.sh ops latent models drafts draws wide many   the checks
#   tests/gpu/run.sh bench model          the timings
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT" build/gpu
start=$(date +%s)
make -s -j "$(nproc)" -f tests/gpu/Makefile >"$OUT/build.log" 2>&1 || { tail -40 "$OUT/build.log"; exit 3; }
echo "built in $(($(date +%s) - start)) s with $(nproc) cores"
timeout "${LIMIT:-420}" build/gpu/gpu_check --csv "$OUT/gpu_check.csv" "$@" 2>&1 | tee "$OUT/gpu_check.log"
exit "${PIPESTATUS[0]}"
