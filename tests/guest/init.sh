#!/bin/busybox sh
# The guest's first process: this machine's root, read-only, under the layer of packages and a RAM disk; then the agent.
fail() { echo "guest: init failed: $*"; poweroff -f; }
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
. /settings
while read -r name parameters; do
    insmod "/modules/$name" $parameters || fail "insmod $name"
done < /modules/order
mount -t virtiofs -o ro host /host || fail "the host's root"
mount -t virtiofs -o ro layer /layer || fail "the packages"
mount -t tmpfs -o size=70% top /top
mkdir /top/upper /top/work
mount -t overlay -o "lowerdir=/layer:/host,upperdir=/top/upper,workdir=/top/work" root /new || fail "overlay"
ip link set lo up
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
hostname guest
echo guest > /new/etc/hostname
tr -d - < /proc/sys/kernel/random/uuid > /new/etc/machine-id
: > /new/etc/fstab
# It is a machine, whatever this one is.
rm -f /new/.dockerenv
for folder in proc sys dev; do
    mount --move "/$folder" "/new/$folder" || fail "move $folder"
done
mount -t configfs config /new/sys/kernel/config
[ -e /new/dev/fd ] || ln -s /proc/self/fd /new/dev/fd
echo "guest: root is ready"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
if [ "$init" = systemd ]; then
    units=/new/etc/systemd/system
    printf '[Unit]\nRequires=basic.target guest-agent.service\nAllowIsolate=yes\n' > $units/guest.target
    printf '[Unit]\nAfter=basic.target\n[Service]\nExecStart=%s\nExecStopPost=systemctl poweroff -ff\n' "$agent" \
        > $units/guest-agent.service
    # They would go through all of this machine's /tmp, and empty it as the guest sees it.
    for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-clean.timer; do
        ln -sf /dev/null "$units/$unit"
    done
    exec /bin/switch_root /new /usr/lib/systemd/systemd --unit=guest.target
fi
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs -o mode=1777 shm /new/dev/shm
mount -t devpts pts /new/dev/pts
mount -t tmpfs -o mode=755 run /new/run
exec /bin/switch_root /new /bin/sh -c "$agent; echo \"guest: exit \$?\"; exec $busybox poweroff -f"
