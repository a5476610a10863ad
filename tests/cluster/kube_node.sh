# The namespaces of a cluster: mounts, network and processes of its own. They end with this script's input; this
# shell is their first process, which collects the ended ones.
set -eu
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=755 log /var/log
mount --make-rshared /
mount -t proc proc /proc
ip link set lo up
ip link add name node type bridge
ip address add "$1/24" dev node
ip link set node up
echo ready
cat
