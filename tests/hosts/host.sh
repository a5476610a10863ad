# One throw-away host: what runs inside its namespaces (network, mounts, names, IPC). Commands come on standard
# input, one a line (start, stop); the end of input, also by a crash of whoever wrote there, ends the host.
# Arguments: directory of the host, its name, a directory of files to lay over its root (may be empty), and the
# program systemd-nspawn where a systemd is to run there (empty: sshd alone). Then stop is a power cut, and start
# the next boot. Last a directory of this machine that the host sees read-only in /srv/packages (may be empty).
set -eu
umask 022
directory=$1 name=$2 layer=$3 nspawn=$4 packages=$5
sshd= groups=

stop() {
    [ -z "$sshd" ] || { kill -KILL "$sshd" && wait "$sshd"; } 2>/dev/null || :
    sshd=
    for group in $groups; do
        until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || [ ! -d "$group" ]; do sleep 0.05; done
    done
    groups=
}

# Its systemd starts sshd, and units that tests enable; nothing of what this machine would start.
prepare_systemd() {
    rm -rf root/etc/systemd/system root/etc/rc?.d root/etc/fstab root/etc/systemd/system.conf.d
    mkdir -p root/etc/systemd/system/multi-user.target.wants root/etc/systemd/journald.conf.d
    for unit in systemd-logind.service getty.target systemd-networkd.service systemd-resolved.service; do
        ln -s /dev/null "root/etc/systemd/system/$unit"
    done
    printf '[Journal]\nStorage=volatile\nRuntimeMaxUse=16M\n' >root/etc/systemd/journald.conf.d/oeprov-test.conf
    printf '%s\n' '[Service]' 'RuntimeDirectory=sshd' \
        'ExecStart=/usr/sbin/sshd -D -f /etc/oeprov-test/sshd_config' 'KillMode=process' \
        >root/etc/systemd/system/oeprov-test-sshd.service
    ln -s ../oeprov-test-sshd.service root/etc/systemd/system/multi-user.target.wants/
    od -An -N16 -tx1 /dev/urandom | tr -d ' ' >root/etc/machine-id
    mount -t tmpfs -o mode=755 run /run
    mkdir -p /run/systemd/nspawn
}

# A control group of its own for each host: systemd manages what is below it.
start_systemd() {
    hierarchies=/sys/fs/cgroup
    [ ! -d /sys/fs/cgroup/systemd ] || hierarchies="/sys/fs/cgroup/systemd /sys/fs/cgroup/unified"
    for hierarchy in $hierarchies; do
        [ -d "$hierarchy" ] || continue
        groups="$groups $hierarchy/oeprov-test-$$"
        mkdir "$hierarchy/oeprov-test-$$"
    done
    (
        for group in $groups; do echo 0 >"$group/cgroup.procs"; done
        exec unshare --pid --fork --kill-child=KILL --mount-proc "$nspawn" --quiet --register=no --keep-unit \
            --machine="$name" --directory=root --resolv-conf=off --timezone=off --link-journal=no \
            --console=pipe --boot </dev/null >>"$directory/sshd.log" 2>&1
    ) &
    sshd=$!
}
trap stop EXIT

hostname "$name"
mkdir "$directory/disk"
mount -t tmpfs -o size=256m,mode=755 oeprov-host "$directory/disk"
cd "$directory/disk"
mkdir upper work root
mount -t overlay -o "lowerdir=/,upperdir=upper,workdir=work" oeprov-root root
if [ -z "$nspawn" ]; then
    mount -t tmpfs -o mode=755 run root/run
    mount -t tmpfs -o mode=1777 tmp root/tmp
    mount --rbind /dev root/dev
    mount -t sysfs sys root/sys
    # A machine with a balloon grows and shrinks while a test runs; its hosts do not.
    for file in root/sys/devices/system/node/node*/meminfo; do
        [ -e "$file" ] || continue
        node=${file%/meminfo}
        cp "$file" "meminfo-${node##*/}"
        mount --bind "meminfo-${node##*/}" "$file"
    done
    mkdir -p root/run/sshd root/run/systemd/system # as on a booted host
else
    prepare_systemd
fi
mount -t tmpfs -o mode=700 home root/root
mkdir -p root/etc/oeprov-test
cp --no-preserve=mode "$directory/sshd_config" "$directory/authorized_keys" root/etc/oeprov-test/
# The layer has the umask of whoever runs the tests: without this, it may shut other users out of /usr.
# Links of this machine are replaced, not followed: absolute ones lead out of the root, to the machine itself.
[ -z "$layer" ] || { chmod -R go+rX "$layer" && cp -a --remove-destination "$layer/." root/; }
if [ -n "$packages" ]; then
    mkdir -p root/srv/packages
    mount --bind "$packages" root/srv/packages
    mount -o remount,bind,ro root/srv/packages
fi
echo "$name" >root/etc/hostname
ssh-keygen -q -t ed25519 -N '' -C "$name" -f root/etc/oeprov-test/host_key
cp root/etc/oeprov-test/host_key.pub "$directory/"

while read -r command; do
    case $command in
    start)
        [ -z "$nspawn" ] || { start_systemd; echo "$command"; continue; }
        # A process namespace a run: its end takes every login with it.
        unshare --pid --fork --kill-child=KILL --mount-proc="$PWD/root/proc" \
            chroot root /usr/sbin/sshd -D -e -f /etc/oeprov-test/sshd_config </dev/null 2>>"$directory/sshd.log" &
        sshd=$!
        ;;
    stop) stop ;;
    esac
    echo "$command"
done
