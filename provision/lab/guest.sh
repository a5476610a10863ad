#!/bin/sh
# Turns a fresh Debian root into the system of a lab node. mmdebstrap runs it as its customize hook:
#   $1  the root
#   $2  a directory with the .deb files that are ours
#   $3  packages that oeprov may install on a node: they go into the node's own repository
# The kernel that is installed is older than the newest one, which goes into the repository.
set -eu
root=$1 ours=$2 repository=$3
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
outside() { APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" "$@"; } # with the network of this machine, on the packages of the root

# ---- A small initramfs, quick to make, and no parts of a kernel package that a virtual machine cannot use ----
mkdir -p "$root/etc/initramfs-tools/conf.d"
printf 'MODULES=list\nCOMPRESS=lz4\n' >"$root/etc/initramfs-tools/conf.d/lab"
printf 'virtio_pci\nvirtio_blk\next4\ncrc32c_generic\n' >>"$root/etc/initramfs-tools/modules"
{
  for part in drivers/gpu drivers/media drivers/infiniband drivers/net/wireless drivers/net/ethernet drivers/iio \
    drivers/staging drivers/usb drivers/hid drivers/mtd drivers/scsi drivers/isdn drivers/bluetooth \
    drivers/hwmon drivers/video sound net/bluetooth net/wireless net/mac80211; do
    printf 'path-exclude=/lib/modules/*/kernel/%s/*\n' "$part"
  done
} >"$root/etc/dpkg/dpkg.cfg.d/lab-kernel"

# ---- Kernels ------------------------------------------------------------------------------------------------
newest=$(outside apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: linux-image-\([0-9].*\)/\1/p')
older=$(outside apt-cache pkgnames linux-image- | sed -n 's/^linux-image-\([0-9][0-9.]*[-+][a-z0-9.]*-amd64\)$/\1/p' |
  sort -V | sed "/^$newest\$/,\$d" | tail -1)
[ -n "$older" ] || { echo "no kernel older than $newest is packaged" >&2; exit 1; }
# The boot loader's menu is written by the first boot; there is no disk yet.
chroot "$root" apt-get install -y --no-install-recommends "linux-image-$older"

# ---- The node's own repository: no network is needed, and `apt-get update` is quick ------------------------
mkdir -p "$root/srv/apt" "$root/var/cache/apt/archives/partial"
# Some names are of later releases only (cxl).
there=$(for name in $repository; do ! outside apt-cache show "$name" >/dev/null 2>&1 || echo "$name"; done)
# shellcheck disable=SC2086  # a list of names
rm -f "$root"/var/cache/apt/archives/*.deb
outside apt-get install -y --download-only --no-install-recommends $there linux-image-amd64
mv "$root"/var/cache/apt/archives/*.deb "$root/srv/apt/"
cp "$ours"/*.deb "$root/srv/apt/"
# xz is slow to unpack under emulation, and so are thousands of drivers that no virtual machine has.
for deb in "$root"/srv/apt/linux-image-"$newest"_*.deb; do
  dpkg-deb -R "$deb" "$root/srv/unpacked"
  for folder in sound net/wireless net/mac80211 drivers/gpu drivers/media drivers/net/wireless \
    drivers/net/ethernet drivers/infiniband drivers/staging drivers/iio drivers/isdn drivers/scsi drivers/usb \
    drivers/hwmon drivers/input/joystick drivers/input/misc drivers/input/tablet drivers/input/touchscreen \
    drivers/mtd drivers/hid; do  # evdev stays: the power button reaches logind through it
    rm -rf "$root"/srv/unpacked/lib/modules/*/kernel/"$folder"
  done
  dpkg-deb -Zzstd -z3 -b "$root/srv/unpacked" "$deb" >/dev/null
  rm -rf "$root/srv/unpacked"
done
(cd "$root/srv/apt" && apt-ftparchive packages . >Packages && apt-ftparchive release . >../Release && mv ../Release .)
rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/* "$root"/etc/apt/apt.conf.d/99mmdebstrap
echo 'deb [trusted=yes] file:/srv/apt ./' >"$root/etc/apt/sources.list"
cat >"$root/etc/apt/apt.conf.d/80lab" <<'END'
Acquire::Languages "none";
APT::Install-Recommends "false";
DPkg::Lock::Timeout "120";
END
rm -rf "$root"/var/lib/apt/lists/*
chroot "$root" apt-get update

# ---- The system ---------------------------------------------------------------------------------------------
cat >"$root/etc/default/grub" <<'END'
GRUB_DEFAULT=0
GRUB_TIMEOUT=1
GRUB_DISTRIBUTOR=`lsb_release -i -s 2> /dev/null || echo Debian`
GRUB_CMDLINE_LINUX_DEFAULT="quiet"
GRUB_CMDLINE_LINUX="console=ttyS0"
GRUB_TERMINAL="serial"
GRUB_DISABLE_OS_PROBER=true
END
rm -f "$root"/etc/ssh/ssh_host_* "$root/etc/hostname" "$root/etc/resolv.conf"
cat >"$root/etc/ssh/sshd_config.d/lab.conf" <<'END'
PermitRootLogin prohibit-password
PasswordAuthentication no
HostKey /etc/ssh/ssh_host_ed25519_key
UseDNS no
END
# Name and keys of a node come with the machine, as QEMU firmware configuration. The network is always the same;
# networkd would take five seconds of the boot.
cat >"$root/usr/local/sbin/lab-identity" <<'END'
#!/bin/sh
set -eu
given=/sys/firmware/qemu_fw_cfg/by_name/opt/oeprov
put() { # NAME FILE MODE
  [ -e "$given/$1/raw" ] || exit 1
  cmp -s "$given/$1/raw" "$2" && return
  (umask 077 && cat "$given/$1/raw" >"$2.new")
  chmod "$3" "$2.new"
  mv "$2.new" "$2"
  sync "$2"
}
put hostname /etc/hostname 644
put host_key /etc/ssh/ssh_host_ed25519_key 600
mkdir -p -m 700 /root/.ssh
put authorized_keys /root/.ssh/authorized_keys 600
hostname "$(cat /etc/hostname)"
network() {
  for card in /sys/class/net/e*; do
    name=${card##*/}
    ip link set "$name" up && ip address replace 10.0.2.15/24 dev "$name" && ip route replace default via 10.0.2.2
  done
}
# The card may not be there yet, and udev gives it another name about now.
until network 2>/dev/null; do sleep 0.2; done
grep -q "127.0.1.1 $(cat /etc/hostname)" /etc/hosts || echo "127.0.1.1 $(cat /etc/hostname)" >>/etc/hosts
END
chmod 755 "$root/usr/local/sbin/lab-identity"
printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
cat >"$root/etc/systemd/system/lab-identity.service" <<'END'
[Unit]
Description=Name, keys and network of this lab node
Before=ssh.service network.target
Wants=network.target
[Service]
Type=oneshot
ExecStartPre=-/sbin/modprobe -a qemu_fw_cfg virtio_net
ExecStart=/usr/local/sbin/lab-identity
RemainAfterExit=yes
StandardError=journal+console
[Install]
WantedBy=multi-user.target
END
mkdir -p "$root/etc/systemd/system.conf.d"
printf '[Manager]\nDefaultTimeoutStopSec=20s\n' >"$root/etc/systemd/system.conf.d/lab.conf"
chroot "$root" systemctl enable -q lab-identity ssh
# What these do takes time under emulation and serves nobody here.
chroot "$root" systemctl mask -q apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service \
  fstrim.timer dpkg-db-backup.timer man-db.timer getty@tty1.service serial-getty@ttyS0.service \
  systemd-pcrphase.service systemd-pcrphase-sysinit.service systemd-networkd.service \
  systemd-binfmt.service dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
  systemd-update-utmp.service systemd-update-utmp-runlevel.service modprobe@drm.service modprobe@efi_pstore.service \
  modprobe@fuse.service modprobe@loop.service modprobe@dm_mod.service systemd-pstore.service
: >"$root/etc/machine-id"
chroot "$root" passwd -l root >/dev/null

# ---- Run once, as init, on the finished disk ----------------------------------------------------------------
cat >"$root/usr/local/sbin/lab-first-boot" <<'END'
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
finish() { sync; mount -o remount,ro /boot; mount -o remount,ro /; echo 1 >/proc/sys/kernel/sysrq; echo o >/proc/sysrq-trigger; sleep 60; }
mount -o remount,rw / && mount -a && mount -t tmpfs tmpfs /tmp &&
  { mountpoint -q /proc || mount -t proc proc /proc; } && { mountpoint -q /sys || mount -t sysfs sysfs /sys; } &&
  grub-install /dev/vda && update-grub && rm -f /usr/local/sbin/lab-first-boot && echo "lab: disk is bootable"
umount /tmp
finish
END
chmod 755 "$root/usr/local/sbin/lab-first-boot"
echo "$older $newest" >"$root/srv/kernels"
