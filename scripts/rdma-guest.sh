#!/usr/bin/env bash
# Runs a command in a small virtual machine that has RDMA devices: Debian's kernel with Soft-RoCE
# (rdma_rxe), under software emulation. So verbs are tested for real on a machine without an RDMA
# NIC or KVM. Throughput is that of emulation: compare it only with perftest in the same guest.
#
#   scripts/rdma-guest.sh [-f FILE[:DEST]]... [-m MEMORY_MB] [-t SECONDS] -- COMMAND...
#   scripts/rdma-guest.sh --check       # exit status 77, and a line that says why, if it cannot run; fetches the kernel
#   scripts/rdma-guest.sh --install     # the Debian packages it needs (root, with SETUP=1 or CI=true)
#
# -f   copies FILE, and the shared libraries it links, into the guest: to /bin/NAME unless DEST says where
# -m   memory of the guest in MiB (1536)
# -t   the longest it may take, seconds (300)
#
# In the guest: rails rxe0 (interface v0, 10.0.0.1) and rxe1 (v1, 10.0.1.1), MTU 9000. Two processes meet on one rail; `/bin/ip link set v0 down` kills rail 0.
# /bin has busybox, ibv_devinfo, ib_write_bw, ib_read_bw, rdma and ip (say /bin/ip: the shell's own is busybox's). The exit status is the command's; 125: there was none.
set -euo pipefail
source "$(dirname "$0")/packages.sh"
packages=(qemu-system-x86 busybox-static cpio kmod rdma-core ibverbs-utils ibverbs-providers perftest iproute2)
tools=(qemu-system-x86_64 busybox cpio depmod modprobe ip rdma ibv_devinfo ib_write_bw ib_read_bw)
modules=(crc32_generic rdma_rxe ib_uverbs rdma_ucm veth)
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
kernel=$cache/rdma-kernel
export PATH=$PATH:/usr/sbin:/sbin # modprobe and ip are there for users, too
say() { echo "rdma-guest: $*" >&2; }

missing_tools() { for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || echo "$tool"; done; }

install_missing() {
  [[ -z $(missing_tools) ]] || install_packages "rdma-guest: $(missing_tools | tr '\n' ' ')" "${packages[@]}" || return 77
}

# The kernel package is unpacked into the cache, never installed.
fetch_kernel() {
  mkdir -p "$cache"
  exec 8>"$cache/rdma-kernel.lock"
  flock 8
  [[ ! -d $kernel ]] || return 0
  local new package
  new=$(mktemp -d "$cache/new.XXXXXX")
  chmod 755 "$new" # apt-get drops its rights for a download
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: //p' | head -n 1)
  say "fetching the kernel package '$package' into $cache"
  if (cd "$new" && apt-get download -qq "$package" >/dev/null 2>&1 && dpkg-deb -x "$package"_*.deb kernel) &&
    depmod -b "$new/kernel" "$(ls "$new/kernel/lib/modules")"; then
    mv "$new/kernel" "$kernel"
  else
    say "could not get the kernel package '$package' (no network, or apt-get update is needed)"
  fi
  rm -rf "$new"
  [[ -d $kernel ]] || return 77
}

check() {
  [[ -z $(missing_tools) ]] || { say "missing: $(missing_tools | tr '\n' ' ')(scripts/rdma-guest.sh --install)"; return 77; }
  fetch_kernel
}

memory=1536 limit=300 files=()
case ${1-} in
  --install) install_missing; exit ;;
  --check) check; exit ;;
esac
while getopts f:m:t: option; do
  case $option in f) files+=("$OPTARG") ;; m) memory=$OPTARG ;; t) limit=$OPTARG ;; *) exit 2 ;; esac
done
shift $((OPTIND - 1))
(($#)) || { say "no command (see the head of this file)"; exit 2; }
check
release=$(ls "$kernel/lib/modules")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,etc/libibverbs.d,lib,lib64,modules,tmp,run,usr/lib}
add() { # FILE [DEST]: the file, and the libraries it links
  local dest=${2:-/bin/$(basename "$1")} library
  mkdir -p "$root$(dirname "$dest")"
  cp -L "$1" "$root$dest"
  for library in $(ldd "$1" 2>/dev/null | grep -o '/[^ ]*' || true); do
    [[ -e $root$library ]] || { mkdir -p "$root$(dirname "$library")" && cp -L "$library" "$root$library"; }
  done
}
for tool in busybox ip rdma ibv_devinfo ib_write_bw ib_read_bw; do add "$(command -v "$tool")"; done
for file in ${files[@]+"${files[@]}"}; do
  [[ -f ${file%%:*} ]] || { say "no file ${file%%:*}"; exit 2; }
  if [[ $file == *:* ]]; then add "${file%%:*}" "${file#*:}"; else add "$file"; fi
done
provider=$(find /usr/lib -name 'librxe-rdmav*.so' | head -n 1)
add "$provider" "$provider"
cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
# In the order in which they are to be inserted, each once.
for module in "${modules[@]}"; do
  modprobe -d "$kernel" -S "$release" --show-depends "$module" | awk '{ print $2 }'
done | awk '!seen[$0]++' | while read -r path; do
  cp "$path" "$root/modules/" && echo "/modules/$(basename "$path")" >>"$root/modules/order"
done
printf '%q ' "$@" >"$root/command"
cat >"$root/init" <<'GUEST'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
for module in $(cat /modules/order); do insmod "$module" || echo "rdma-guest: insmod $module failed"; done
ulimit -l unlimited
/bin/ip link set lo up
for rail in 0 1; do
  /bin/ip link add "v$rail" type veth peer name "w$rail"
  /bin/ip addr add "10.0.$rail.1/24" dev "v$rail"
  /bin/ip link set "w$rail" mtu 9000 up
  /bin/ip link set "v$rail" mtu 9000 up
  rdma link add "rxe$rail" type rxe netdev "v$rail"
done
sleep 1
for rail in 0 1; do [ -e "/sys/class/infiniband/rxe$rail" ] || echo "rdma-guest: there is no rxe$rail"; done
echo "rdma-guest-ready"
sh /command
echo "rdma-guest-status: $?"
poweroff -f
GUEST
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initrd"
rm -rf "$root"

exec 9>"$cache/rdma-guest.lock" # one at a time: two would fight for the processors, and time out
flock 9
# Boots the guest and runs the command. Now and then an emulated processor stalls while it boots: then the guest is ended early.
run_guest() {
  : >"$work/log"
  (
    exec 9>&- # the lock is not the watchdog's
    sleep "$boot_limit"
    grep -q '^rdma-guest-ready' "$work/log" || kill "$(cat "$work/pid")"
  ) >/dev/null 2>&1 &
  local watchdog=$!
  # The end of this script ends the guest, too.
  setpriv --pdeathsig TERM timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m "$memory" -no-reboot -nic none -display none -vga none \
    -monitor none -serial stdio -pidfile "$work/pid" -kernel "$kernel/boot/vmlinuz-$release" -initrd "$work/initrd" -append "console=ttyS0 panic=-1 quiet" </dev/null |
    sed -u 's/\r//g' | tee "$work/log" | grep --line-buffered -v -e '^rdma-guest-status: ' -e '^rdma-guest-ready' -e 'reboot: Power down' || true
  kill "$watchdog" 2>/dev/null || true
}

boot_limit=90
for attempt in 1 2 3; do
  run_guest
  if grep -q '^rdma-guest-ready' "$work/log"; then break; fi
  say "the guest did not boot in $boot_limit s (attempt $attempt of 3)"
done
status=$(sed -n 's/^rdma-guest-status: \([0-9]*\)$/\1/p' "$work/log" | tail -n 1)
[[ -n $status ]] || say "the guest ended without a status: it took more than $limit s, or did not boot"
exit "${status:-125}"
