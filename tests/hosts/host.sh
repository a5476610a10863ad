# One throw-away host: what runs inside its namespaces (network, mounts, names, IPC). Commands come on standard
# input, one a line (start, stop); the end of input, also by a crash of whoever wrote there, ends the host.
# Arguments: directory of the host, its name, a directory of files to lay over its root (may be empty).
set -eu
directory=$1 name=$2 layer=$3
sshd=

stop() {
    [ -z "$sshd" ] || { kill -KILL "$sshd" && wait "$sshd"; } 2>/dev/null || :
    sshd=
}
trap stop EXIT

hostname "$name"
mkdir "$directory/disk"
mount -t tmpfs -o size=64m,mode=755 oeprov-host "$directory/disk"
cd "$directory/disk"
mkdir upper work root
mount -t overlay -o "lowerdir=/,upperdir=upper,workdir=work" oeprov-root root
mount -t tmpfs -o mode=755 run root/run
mount -t tmpfs -o mode=1777 tmp root/tmp
mount --rbind /dev root/dev
mount -t tmpfs -o mode=700 home root/root
mount -t sysfs sys root/sys
# A machine with a balloon grows and shrinks while a test runs; its hosts do not.
for file in root/sys/devices/system/node/node*/meminfo; do
    [ -e "$file" ] || continue
    node=${file%/meminfo}
    cp "$file" "meminfo-${node##*/}"
    mount --bind "meminfo-${node##*/}" "$file"
done
mkdir -p root/run/sshd root/etc/oeprov-test
cp "$directory/sshd_config" "$directory/authorized_keys" root/etc/oeprov-test/
# Links of this machine are replaced, not followed: absolute ones lead out of the root, to the machine itself.
[ -z "$layer" ] || cp -a --remove-destination "$layer/." root/
echo "$name" >root/etc/hostname
ssh-keygen -q -t ed25519 -N '' -C "$name" -f root/etc/oeprov-test/host_key
cp root/etc/oeprov-test/host_key.pub "$directory/"

while read -r command; do
    case $command in
    start)
        # A process namespace a run: its end takes every login with it.
        unshare --pid --fork --kill-child=KILL --mount-proc="$PWD/root/proc" \
            chroot root /usr/sbin/sshd -D -f /etc/oeprov-test/sshd_config </dev/null 2>>"$directory/sshd.log" &
        sshd=$!
        ;;
    stop) stop ;;
    esac
    echo "$command"
done
