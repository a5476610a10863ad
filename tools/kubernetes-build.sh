#!/usr/bin/env bash
# Builds Kubernetes' four programs from Debian 12's source package (1.20.2) into .cache/kubernetes/bin; as root. Takes six
# minutes of one processor, and 3 GB while it does. What was compiled is kept until all is: a build that
# was interrupted goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=$PWD/.cache/kubernetes
build=$cache/build
programs=()
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  [ -x "$cache/bin/$name" ] || programs+=("$name")
done
[ ${#programs[@]} -gt 0 ] || exit 0

fail() { printf 'kubernetes: %s\n' "$*" >&2; exit 1; }

. /etc/os-release
[ "${VERSION_CODENAME:-}" = bookworm ] ||
  fail "only Debian 12's source is known to build, and this is ${PRETTY_NAME:-another system}: bring the programs yourself" \
    "and give KUBERNETES=DIRECTORY"
[ "$(id -u)" -eq 0 ] || fail "building takes packages, and so root"
mkdir -p "$build/lists/partial" "$build/bin"
exec 9>"$build/lock"
flock -n 9 || fail "another build is under way in $build"
free=$(df --output=avail -k "$build" | tail -n 1)
[ "$free" -ge 4000000 ] || fail "$build has $((free / 1000)) MB left, and building takes 4000"

packages=(golang-go golang-github-modern-go-reflect2-dev dpkg-dev)
missing=()
for name in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] || DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" ||
  fail "no ${missing[*]}: apt-get update may help"

if [ ! -e "$build/unpacked" ]; then
  # This machine's mirrors, with a list of sources of its own: the machine's stays as it is.
  apt-get indextargets --format "deb-src \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' |
    sort -u | grep -E " $VERSION_CODENAME(-updates|-security)? main\$" >"$build/sources.list" ||
    fail "apt knows no mirror of Debian 12's main: run apt-get update"
  own=(-o "Dir::Etc::sourcelist=$build/sources.list" -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root
    -o "Dir::State::lists=$build/lists")
  rm -rf "$build"/kubernetes-*/
  apt-get "${own[@]}" -q update
  (cd "$build" && apt-get "${own[@]}" -q source kubernetes) || fail "no source package kubernetes from these mirrors"
  # The vendored one does not work with Go 1.18 and later; Debian's does.
  rm -rf "$build"/kubernetes-*/vendor/github.com/modern-go/reflect2
  cp -rL /usr/share/gocode/src/github.com/modern-go/reflect2 "$build"/kubernetes-*/vendor/github.com/modern-go/
  touch "$build/unpacked"
fi
source=$(echo "$build"/kubernetes-*/)
version=${source%/}
version=${version##*[-y]}

# Go alone, and not the tree's own make: of all that is generated, the source lacks one file only.
unset GOROOT
export PATH=/usr/lib/go/bin:$PATH GO111MODULE=off GOFLAGS='' GOPATH=$build/go GOCACHE=$build/go-cache CGO_ENABLED=0
mkdir -p "$GOPATH/src/k8s.io"
ln -sfnT "${source%/}" "$GOPATH/src/k8s.io/kubernetes"
cd "$GOPATH/src/k8s.io/kubernetes"
package=k8s.io/kubernetes
generated=pkg/generated/openapi/zz_generated.openapi.go
if [ ! -e "$generated" ]; then
  echo "kubernetes: generating $generated"
  go build -o "$build/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  described=$(grep -rl --include='*.go' -- '+k8s:openapi-gen=' cmd pkg plugin staging/src/k8s.io |
    grep -v -e /code-generator/ -e /sample-apiserver/ | xargs -n 1 dirname | sed 's,^staging/src,vendor,' | LC_ALL=C sort -u |
    sed "s,^,$package/," | paste -s -d ,)
  "$build/bin/openapi-gen" --logtostderr -i "$described" -p "$package/pkg/generated/openapi" -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$build/violations"
fi
echo "kubernetes: building ${programs[*]} $version"
IFS=. read -r major minor _ <<<"$version"
stamps='-s -w'
for names in "$package/vendor/k8s.io/component-base/version" "$package/vendor/k8s.io/client-go/pkg/version"; do
  stamps+=" -X $names.gitVersion=v$version -X $names.gitMajor=$major -X $names.gitMinor=$minor"
  stamps+=" -X $names.gitCommit=debian -X $names.gitTreeState=clean"
done
# Without clouds' volumes and balancers, and Docker's shim, which are nearly half of it.
go build -tags providerless,dockerless -o "$build/bin/" -ldflags "$stamps" "${programs[@]/#/./cmd/}"
mkdir -p "$cache/bin"
for name in "${programs[@]}"; do mv "$build/bin/$name" "$cache/bin/"; done
rm -rf "$build"
