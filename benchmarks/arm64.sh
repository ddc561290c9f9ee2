#!/usr/bin/env bash
# Portable digests on a 64-bit ARM that QEMU emulates, beside those that every other machine has (tests/portable.json).
#
#     benchmarks/arm64.sh [NAME ...]       # e.g. portable-cartpole-lags, which is the default
#
# It needs an x86-64 Debian or Ubuntu with apt-get, dpkg, unzip, and lockstep's environment in .venv. Nothing is
# installed: Debian's Python for ARM, QEMU and the wheels go into $LOCKSTEP_ARM64 (default: ~/.cache/lockstep/arm64).
# torch is 2.8.0, the last version whose wheel for ARM has no CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${LOCKSTEP_ARM64:-$HOME/.cache/lockstep/arm64}
root=$folder/root site=$folder/site
if [ ! -e "$folder/ready" ]; then
    mkdir -p "$folder/debs" "$folder/lists/partial" "$folder/wheels" "$root" "$site"
    arm=(-oAPT::Architecture=arm64 -oAPT::Architectures=arm64 "-oDir::State::Lists=$folder/lists")
    apt-get "${arm[@]}" update
    python=$(apt-cache "${arm[@]}" depends python3 | grep -oE 'python3\.[0-9]+$' | head -n 1)
    (
        cd "$folder/debs"
        apt-get "${arm[@]}" download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 \
            libsqlite3-0 libuuid1 libcrypt1 libgomp1 "$python-minimal" "lib$python-minimal" "lib$python-stdlib"
        for package in *.deb; do dpkg -x "$package" "$root"; done
        apt-get download qemu-user-static
        dpkg -x qemu-user-static*.deb "$folder/qemu"
    )
    version=${python#python}
    platforms=()
    for glibc in 17 27 28; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    platforms+=(--platform manylinux2014_aarch64 --platform any)
    pip=(.venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --implementation cp)
    pip+=(--python-version "$version" "${platforms[@]}" --dest "$folder/wheels")
    PIP_CONSTRAINT=constraints.txt "${pip[@]}" numpy numba llvmlite safetensors xxhash gymnasium farama-notifications \
        cloudpickle tyro typeguard docstring-parser typing-extensions rich pygments markdown-it-py mdurl filelock sympy \
        mpmath networkx jinja2 markupsafe fsspec packaging pytest iniconfig pluggy
    PIP_CONSTRAINT=/dev/null "${pip[@]}" torch==2.8.0
    for wheel in "$folder"/wheels/*.whl; do unzip -q -o "$wheel" -d "$site"; done
    echo "$python" >"$folder/ready"
fi
export PYTHONPATH=$PWD:$PWD/tests:$site NUMBA_CACHE_DIR=$folder/kernels NUMBA_OPT=1 OMP_NUM_THREADS=1
"$folder/qemu/usr/bin/qemu-aarch64-static" -L "$root" "$root/usr/bin/$(cat "$folder/ready")" \
    tests/test_portable.py "$folder/digests.json" "${@:-portable-cartpole-lags}"
.venv/bin/python - "$folder/digests.json" <<'PYTHON'
import json
import sys

found, expected = (json.load(open(name)) for name in (sys.argv[1], "tests/portable.json"))
for name, digest in found.items():
    print(f"{name}: {digest[:12]}, {'equal' if digest == expected[name] else f'NOT EQUAL to {expected[name][:12]}'}")
sys.exit(any(digest != expected[name] for name, digest in found.items()))
PYTHON
