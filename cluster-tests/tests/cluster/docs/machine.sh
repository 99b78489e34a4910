#!/usr/bin/env bash
# A machine with systemd: runs FOLDER/script there as a unit, and ends with its status. Its root is
# an overlay of this one, so what is written outside FOLDER is gone afterwards. Its network is
# loopback, with the addresses of docs/. BINARIES is /opt/baton there, MODEL /opt/model.gguf.
# Needs root.
set -euo pipefail
folder=$1
binaries=$2
model=$3
stage=${4-}

if [[ -z $stage ]]; then
  exec unshare --mount bash "$0" "$@" group
fi

# systemd wants a tree of control groups of its own.
if [[ $stage == group ]]; then
  mount -t cgroup2 none /mnt
  group=/mnt/machine-$$
  mkdir "$group"
  trap 'find "$group" -depth -type d -exec rmdir {} + || true' EXIT
  (
    echo "$BASHPID" >"$group/cgroup.procs"
    exec unshare --mount --net --pid --cgroup --ipc --uts --fork --kill-child bash "$0" "$folder" "$binaries" "$model" boot
  ) </dev/null >>"$folder/log" 2>&1 || true
  cat "$folder/log" >&2
  exit "$(cat "$folder/status")"
fi

for host in 1 2 3 4 9 10 11 12; do
  ip address add "10.0.0.$host/24" dev lo
done
ip link set lo up
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay none -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
# What systemd wants of a container: the kernel's settings cannot be written.
mount -t proc none proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro none sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs none dev
cp -a /dev/{null,zero,full,random,urandom,tty} dev/
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
mount -t tmpfs none run
mount -t tmpfs none tmp
# An overlay has nothing of what is mounted below its lower folder.
mkdir -p ".$folder" opt/baton
mount --bind "$folder" ".$folder"
mount --bind -o ro "$binaries" opt/baton
touch opt/model.gguf
mount --bind -o ro "$model" opt/model.gguf
mkdir -p run/systemd/system
cat >run/systemd/system/page.service <<UNIT
[Service]
Type=oneshot
WorkingDirectory=$folder
ExecStart=/bin/bash $folder/script
# Not in order: units have minutes to drain.
ExecStopPost=/bin/sh -c 'echo \$EXIT_STATUS >status; systemctl --force --force poweroff'
StandardOutput=append:$folder/log
StandardError=inherit
UNIT
exec chroot . env -i container=page PATH="$PATH" /lib/systemd/systemd --unit=page.service --show-status=no --log-target=null
