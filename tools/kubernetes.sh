#!/usr/bin/env bash
# Brings what `make test-kubernetes` needs: etcd and containerd from Debian, and Kubernetes' programs in
# .cache/kubernetes/bin, built once from the source package of Debian 12 (10 minutes and more). KUBERNETES=DIRECTORY
# says that they are there already, of any version: those of a release's kubernetes-server-linux-amd64.tar.gz, say.
set -euo pipefail
cd "$(dirname "$0")/.."
programs="kube-apiserver kube-controller-manager kube-scheduler kubelet"
cache=$PWD/.cache/kubernetes
bin=${KUBERNETES:-$cache/bin}

absent() { for name in $programs; do [ -x "$bin/$name" ] || echo "$name"; done; }

packages() {
  missing=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p' |
    sort | comm -13 - <(printf '%s\n' "$@" | sort))
  [ -z "$missing" ] || apt-get install -y -q --no-install-recommends $missing
}

packages etcd-server containerd runc containernetworking-plugins iproute2 iptables conntrack openssl mmdebstrap
[ -n "$(absent)" ] || exit 0
if [ -n "${KUBERNETES:-}" ]; then
  echo "error: KUBERNETES=$KUBERNETES has no $(absent | paste -s -d ' ')" >&2
  exit 1
fi

packages golang-go golang-github-modern-go-reflect2-dev dpkg-dev rsync jq
mkdir -p "$cache/source" "$bin"
cd "$cache/source"
# An apt of its own, so that this machine's list of sources stays as it is.
mkdir -p apt/lists/partial
. /etc/os-release
sed 's/^deb /deb-src /' >apt/sources.list < <(apt-get indextargets --format \
  'deb [signed-by=$(SIGNED_BY)] $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  sed 's/ \[signed-by=\$(SIGNED_BY)\]//' | sort -u | grep -E " $VERSION_CODENAME(-updates|-security)? ")
own=(-o "Dir::Etc::sourcelist=$PWD/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$PWD/apt/lists" -o APT::Sandbox::User=root)
apt-get "${own[@]}" -q update
apt-get "${own[@]}" -q source kubernetes
cd kubernetes-*/
# The vendored reflect2 does not work with Go 1.18 and later; Debian's does.
rm -rf vendor/github.com/modern-go/reflect2
cp -rL /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/
export KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean CGO_ENABLED=0 HOME=$PWD
make all WHAT="$(printf 'cmd/%s ' $programs)"
for name in $programs; do install "_output/bin/$name" "$bin/"; done
cd .. && rm -rf "$cache/source"
