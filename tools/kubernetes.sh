#!/usr/bin/env bash
# Brings what `make test-kubernetes` needs beside Kubernetes' own programs: etcd, containerd and CNI plugins of Debian.
# Those programs, of any version from 1.20 on, are in the directory that KUBERNETES names, or in .cache/kubernetes/bin;
# a release's kubernetes-server-linux-amd64.tar.gz has them in kubernetes/server/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${KUBERNETES:-$PWD/.cache/kubernetes/bin}

absent=()
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  [ -x "$bin/$name" ] || absent+=("$name")
done
if [ ${#absent[@]} -gt 0 ]; then
  echo "error: $bin has no ${absent[*]}: make test-kubernetes KUBERNETES=DIRECTORY, with those of a release" \
    "(kubernetes/server/bin of its kubernetes-server-linux-amd64.tar.gz)" >&2
  exit 1
fi

packages=(etcd-server containerd runc containernetworking-plugins iproute2 iptables openssl mmdebstrap)
missing=()
for name in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] || DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
