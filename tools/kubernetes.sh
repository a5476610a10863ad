#!/usr/bin/env bash
# Brings what `make test-kubernetes` needs: etcd, containerd, CNI plugins and docker of Debian, and Kubernetes' own programs.
# These are in the directory that KUBERNETES names, of any version from 1.20 on (a release's
# kubernetes-server-linux-amd64.tar.gz has them in kubernetes/server/bin); else in .cache/kubernetes/bin, built once from
# Debian's sources.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${KUBERNETES:-$PWD/.cache/kubernetes/bin}

absent=()
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  [ -x "$bin/$name" ] || absent+=("$name")
done
if [ ${#absent[@]} -gt 0 ]; then
  if [ -n "${KUBERNETES:-}" ]; then
    echo "error: KUBERNETES: $bin has no ${absent[*]}: give a directory with those of a release" \
      "(kubernetes/server/bin of its kubernetes-server-linux-amd64.tar.gz), or leave it out to build Debian's" >&2
    exit 1
  fi
  tools/kubernetes-build.sh
fi

packages=(etcd-server containerd runc containernetworking-plugins iproute2 iptables openssl mmdebstrap)
command -v dockerd >/dev/null || packages+=(docker.io)
missing=()
for name in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] || DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
