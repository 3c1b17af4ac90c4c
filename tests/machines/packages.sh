#!/usr/bin/env bash
# Installs what the tests of jobs on several machines need from the system: ssh's daemon, rsync, network namespaces,
# Slurm and Open MPI. Only root on Debian and its relatives; elsewhere it says so, and those tests skip.
set -euo pipefail
packages=(openssh-server openssh-client rsync iproute2 slurm-wlm munge openmpi-bin)
missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "make: ${missing[*]} CANNOT BE INSTALLED HERE (root and apt-get are needed): THEIR TESTS ARE SKIPPED" >&2
  exit 0
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || true
for package in "${missing[@]}"; do # one by one: what one lacks must not keep the others away
  apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
    echo "make: $package CANNOT BE INSTALLED HERE: ITS TESTS ARE SKIPPED" >&2
done
