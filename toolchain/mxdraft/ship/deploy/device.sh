#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The device's half of a deployment, in POSIX sh and what busybox also has. `mxdraft deploy` sends it over ssh with
# the variables below set in front of it; in an archive it is install.sh, which finds the rest beside itself.
#
#   ACTION    hold: check the device, take the lock, then obey the lines "prove" and "switch" on stdin
#             install: a whole deployment, from the archive; rollback; status
#   DEST      folder of all releases; relative to the home folder
#   MANIFEST  what is to be deployed: lines "key value" (mxdraft.deploy.release)
#   SERVICE   yes: also install the systemd units
#   NOW       the host's clock, in seconds since 1970; empty if unknown
#
#   DEST/mxdraft-deployment      says that deployments made this folder; without it nothing is written or deleted
#   DEST/store/SHA256            files by content; SHA256.part is an upload that has not been proved
#   DEST/releases/ID/            links into the store, and the manifest, whose SHA-256 begins with ID. Such a folder is
#                                whole: it comes and goes by being renamed from and to ID.new
#   DEST/current, DEST/previous  links to releases; renamed into place, so that there is never none
#   DEST/lock                    held with flock(1), which lets go when its holder ends in whatever way
#
# Whatever else is in these folders is somebody else's and stays as it is.
#
# stdout: lines "key value" for the host. stderr: "note: ..." and, last, "error: ...". Exit codes as docs/cli.md.

set -u
umask 022
LC_ALL=C
export LC_ALL

MARKER=mxdraft-deployment
MARKER_TEXT="mxdraft deploy made this folder."
UNITS="mxdraft.socket mxdraft.service"
SYSTEM=${MXDRAFT_SYSROOT-} # tests put another root here

fail() {
    code=$1
    shift
    echo "error: $*" >&2
    exit "$code"
}

note() { echo "note: $*" >&2; }

# The values of a key in the manifest, one a line.
field() { printf '%s\n' "$MANIFEST" | sed -n "s/^$1 //p"; }

# Print $1, a name from a folder, with nothing in it that could control the terminal.
printable() { printf '%s' "$1" | tr -c '[:print:]' '?'; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi </dev/null
}

# ---- preflight: looks, changes nothing ----

check_board() {
    for tool in awk cat chmod cp cut date df dirname flock grep id ln ls mkdir mv printf readlink rm rmdir sed sha256sum \
        sync tail tr uname wc; do
        command -v "$tool" >/dev/null 2>&1 || fail 3 "the device has no $tool: install coreutils and util-linux (or busybox)"
    done
    arch=$(field arch)
    machine=$(uname -m)
    case $arch/$machine in
    "$arch/$arch") ;;
    aarch64/armv*) fail 3 "32-bit kernel ($machine): install the 64-bit Raspberry Pi OS" ;;
    *) fail 3 "this machine is $machine, target $(field target) is for $arch: choose another --target" ;;
    esac
    # A 64-bit kernel may run a 32-bit system, so ask the C library; without getconf, the ELF class of this shell.
    bits=$(getconf LONG_BIT 2>/dev/null) ||
        case $(od -An -tu1 -j4 -N1 "/proc/$$/exe" 2>/dev/null) in *1*) bits=32 ;; *) bits=64 ;; esac
    [ "$bits" = 64 ] || fail 3 "64-bit kernel, $bits-bit userland: install the 64-bit Raspberry Pi OS"
    for feature in $(field features); do
        grep -qE "^(Features|flags)[[:space:]]*:.* $feature( |\$)" "$SYSTEM/proc/cpuinfo" ||
            fail 3 "this CPU lacks $feature, which target $(field target) asks for: use --target rpi"
    done
    clock=$(date +%s)
    if [ -n "$NOW" ] && { [ "$clock" -lt $((NOW - 86400)) ] || [ "$clock" -gt $((NOW + 86400)) ]; }; then
        note "the device's clock is a day or more off ($(date -u)): connect it to a network, or set it with date"
    fi
}

check_memory() {
    need=$(field memory_kib)
    available=$(awk '/^MemAvailable:/ {print $2}' "$SYSTEM/proc/meminfo")
    [ "${available:-0}" -ge "$need" ] ||
        fail 4 "needs $((need / 1024)) MiB of memory, $((${available:-0} / 1024)) MiB are available: close programs," \
            "or choose a target with a smaller context"
}

# Refuse a manifest whose names and hashes could be paths to other places.
check_manifest() {
    if [ -z "$(field file)" ] || field file | grep -qvE '^[0-9a-f]{64} [0-9]{1,18} [a-z][a-z0-9@.-]*$'; then
        fail 3 "the manifest is damaged: deploy again, or unpack the archive again"
    fi
}

# Bytes of a file that are there.
size_of() { if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi; }

check_disk() {
    folder=$DEST
    while [ ! -d "$folder" ]; do folder=$(dirname -- "$folder"); done
    missing=0
    while read -r sha size _; do
        [ -e "$DEST/store/$sha" ] || missing=$((missing + size - $(size_of "$DEST/store/$sha.part")))
    done <<EOF
$(field file)
EOF
    need=$((missing / 1024 + 4096))
    free=$(df -Pk "$folder" | awk 'NR == 2 {print $4}')
    [ "$free" -ge "$need" ] ||
        fail 4 "needs $((need / 1024)) MiB of disk in $folder, $((free / 1024)) MiB are free: make room, or choose another --dest"
}

check_service() {
    [ "$SERVICE" = yes ] || return 0
    case $DEST in
    /home/* | /root/*) fail 2 "--service runs as a user of its own, who cannot read $DEST: use --dest /opt/mxdraft" ;;
    *[!A-Za-z0-9/._-]*) fail 2 "--service allows only letters, digits and / . _ - in --dest" ;;
    esac
    command -v systemctl >/dev/null 2>&1 || fail 3 "--service needs systemd, and this device has no systemctl"
    for unit in $UNITS; do
        file=$(unit_path "$unit")
        case $(kind_of "$file") in
        nothing) continue ;;
        file) grep -qE '^Description=mxdraft|mxdraft deploy' "$file" && continue ;;
        esac
        fail 3 "$file is there, and no deployment wrote it: move it away (systemctl unmask $unit, if it is masked)"
    done
    as_root true 2>/dev/null ||
        fail 3 "--service needs root, and sudo asks for a password: allow sudo without one for this user," \
            "or deploy as root, or run the archive's install.sh there with sudo"
    # As Raspberry Pi OS has it: its firmware starts the kernel with cgroup_disable=memory.
    awk '$1 == "memory" && $4 == 0 { off = 1 } END { exit !off }' "$SYSTEM/proc/cgroups" 2>/dev/null &&
        note "this kernel does not limit memory, so MemoryMax= has no effect:" \
            "append cgroup_enable=memory to the line in /boot/firmware/cmdline.txt and restart the device"
    return 0
}

check_all() {
    check_manifest
    check_board
    check_place
    check_service
    check_memory
    check_disk
}

# ---- ownership of DEST ----

# Print where unit $1 is installed.
unit_path() { echo "$SYSTEM/etc/systemd/system/$1"; }

# Print what kind of file is at $1; a link counts as a link, wherever it points.
kind_of() {
    if [ -L "$1" ]; then
        echo link
    elif [ -f "$1" ]; then
        echo file
    elif [ -d "$1" ]; then
        echo folder
    elif [ -e "$1" ]; then
        echo device
    else
        echo nothing
    fi
}

# Succeed if $1 has $2 characters, all of them hexadecimal digits as sha256sum writes them.
is_hex() {
    case $1 in *[!0-9a-f]*) return 1 ;; esac
    [ ${#1} = "$2" ]
}

# Print the release that link $1 of DEST points to, or nothing.
release_of() {
    id=$(readlink "$DEST/$1" 2>/dev/null)
    case $id in releases/*) is_hex "${id#releases/}" 16 && echo "${id#releases/}" ;; esac
}

# Succeed if folder $1 of releases has the name that its manifest gives.
is_release() {
    is_hex "$1" 16 && [ "$(kind_of "$DEST/releases/$1/manifest")" = file ] &&
        [ "$(sha256sum <"$DEST/releases/$1/manifest" | cut -c1-16)" = "$1" ]
}

is_marked() {
    [ "$(kind_of "$DEST/$MARKER")" = file ] && [ "$(sed -n 1p "$DEST/$MARKER")" = "$MARKER_TEXT" ]
}

# Succeed if DEST holds an installation from before there was a marker: the current release has the name that its
# manifest gives, and the manifest's links.
is_unmarked_installation() {
    current=$(release_of current)
    folder=$DEST/releases/$current
    [ "$(kind_of "$folder")" = folder ] && is_release "$current" && grep -q '^file ' "$folder/manifest" &&
        sed -n 's/^file //p' "$folder/manifest" | while read -r sha _ name; do
            [ "$(readlink "$folder/$name")" = "../../store/$sha" ] || exit 1
        done
}

is_ours() { is_marked || is_unmarked_installation; }

# List DEST, except a marker that was not finished.
contents() { ls -A "$DEST" | grep -vxF "$MARKER.new"; }

# Refuse DEST if one of the names after $1 is of another kind than $1, as which deployments make it: they write through
# nobody's link and over nobody's file.
expect() {
    kind=$1
    shift
    for name; do
        found=$(kind_of "$DEST/$name")
        [ "$found" != link ] || [ -n "$(release_of "$name")" ] || found="link to elsewhere"
        case $found in
        "$kind" | nothing) ;;
        *) fail 3 "$DEST/$name is a $found instead of a $kind that a deployment made: move it away" ;;
        esac
    done
}

# Refuse DEST if it is neither empty nor ours, because deployments delete there what no release needs.
check_place() {
    case $DEST in
    *[[:cntrl:]]*) fail 2 "--dest has characters that control a terminal: choose another" ;;
    "~"* | */.. | */../*) fail 2 "--dest $DEST: expected a path, absolute or below the home folder, without ~ and .." ;;
    esac
    case $(kind_of "$DEST") in
    nothing) return 0 ;;
    link) [ -d "$DEST" ] || fail 3 "$DEST is a link to what is no folder: choose another --dest" ;;
    folder) ;;
    *) fail 3 "$DEST is not a folder: choose another --dest" ;;
    esac
    if [ "$DEST" -ef / ] || [ "$DEST" -ef "${HOME-/}" ]; then
        fail 2 "--dest has to be a folder for deployments alone, not $DEST: choose one below it, such as mxdraft"
    fi
    [ -r "$DEST" ] && [ -x "$DEST" ] || fail 6 "cannot read $DEST: choose another --dest, or another user"
    first=$(contents | sed -n 1p)
    [ -z "$first" ] || is_ours ||
        fail 3 "no deployment made $DEST, and it is not empty (it has $(printable "$first")): choose another --dest, such" \
            "as $DEST/mxdraft. Delete it only if you know that nothing in it is needed"
    expect file "$MARKER" "$MARKER.new" lock log unit
    expect folder store releases
    expect link current previous current.new previous.new
}

# Refuse DEST if there is no deployment in it.
check_ours() {
    [ -d "$DEST" ] && is_ours || fail 3 "nothing is deployed in $DEST"
    check_place
}

# ---- folders and lock ----

# Make DEST, or take an empty one, and mark it before anything else is in it.
make_folders() {
    if [ "$SERVICE" = yes ] && [ ! -w "$DEST" ] && [ -z "$(contents 2>/dev/null)" ]; then
        as_root mkdir -p "$DEST" && as_root chown "$(id -u):$(id -g)" "$DEST"
    fi
    mkdir -p "$DEST" && [ -w "$DEST" ] || fail 6 "cannot write to $DEST: choose another --dest, or another user"
    if ! is_marked; then
        cat >"$DEST/$MARKER.new" <<EOF && sync && mv "$DEST/$MARKER.new" "$DEST/$MARKER" || fail 6 "cannot write to $DEST"
$MARKER_TEXT
Deployments replace and delete what they made in it, and leave the rest alone.
EOF
    fi
    mkdir -p "$DEST/store" "$DEST/releases" || fail 6 "cannot write to $DEST"
}

take_lock() {
    (: >>"$DEST/lock") 2>/dev/null || fail 6 "cannot write to $DEST/lock: another user deployed there"
    exec 9>"$DEST/lock"
    flock -n 9 || fail 6 "another deployment to $DEST is running: wait until it has ended"
}

# For the host, what is to be uploaded: hash, size, and how many bytes are there from an earlier try.
list_missing() {
    field file | while read -r sha size name; do
        [ -e "$DEST/store/$sha" ] && continue
        have=$(size_of "$DEST/store/$sha.part")
        if [ "$have" -gt "$size" ]; then rm -f "$DEST/store/$sha.part" && have=0; fi
        echo "missing $sha $have $name"
    done
}

# ---- proof ----

# Every file in the store is what the manifest says.
check_files() {
    while read -r sha size name; do
        file=$DEST/store/$sha
        [ -e "$file" ] || file=$file.part
        [ "$(size_of "$file")" = "$size" ] || fail 6 "$name is incomplete on the device: run the command again, it goes on from there"
        if [ "$(sha256sum "$file" | cut -c1-64)" != "$sha" ]; then
            rm -f "$file"
            fail 3 "$name is damaged on the device (wrong SHA-256) and was deleted: run the command again; if that repeats, check the SD card"
        fi
        if [ "$file" != "$DEST/store/$sha" ]; then
            sync
            chmod 755 "$file" && mv "$file" "$DEST/store/$sha" || fail 6 "cannot write to $DEST/store"
        fi
    done <<EOF
$(field file)
EOF
}

make_release() {
    release=$DEST/releases/$(printf '%s\n' "$MANIFEST" | sha256sum | cut -c1-16)
    [ -d "$release" ] && return 0
    delete_release "$release.new"
    mkdir "$release.new" && printf '%s\n' "$MANIFEST" >"$release.new/manifest" || fail 6 "cannot write to $DEST/releases"
    while read -r sha _ name; do
        ln -s "../../store/$sha" "$release.new/$name" || fail 6 "cannot write to $DEST/releases"
    done <<EOF
$(field file)
EOF
    sync
    mv "$release.new" "$release" || fail 6 "cannot write to $DEST/releases"
}

# mxdraft of the release with its target's settings.
run_release() {
    command=$1
    shift
    "$release/mxdraft" "$command" -m "$release/model.mxb" -t "$(field threads)" --ctx "$(field ctx)" \
        --precision "$(field precision)" "$@" </dev/null
}

# The release computes the host's bits and says the host's words.
prove_release() {
    digest=$(run_release verify 2>"$DEST/log")
    code=$?
    if [ -n "$digest" ] && [ "$digest" != "$(field digest)" ]; then
        fail 5 "the device computes other bits than the host: digest $digest instead of $(field digest)." \
            "Check power and cooling, and run the command again"
    fi
    [ "$code" = 0 ] || explain "$code" "verify"
    echo "digest $digest"
    run_release generate --raw -p "$(field prompt)" -n "$(field tokens | wc -w)" --ignore-eos --dump-tokens --stats json \
        >/dev/null 2>"$DEST/log" || explain $? "generate"
    tokens=$(sed -n 's/^generated_tokens: //p' "$DEST/log")
    [ "$tokens" = "$(field tokens)" ] ||
        fail 5 "the device generates other tokens than the host: $tokens instead of $(field tokens)"
    tail -n 1 "$DEST/log" | sed -n 's/.*"decode_tok_per_s": *\([0-9.]*\).*/decode_tok_per_s \1/p'
    rm -f "$DEST/log"
}

# A command of the release failed: pass on what it said. Killed by a signal is 128 + its number.
explain() {
    reason=$(tail -n 1 "$DEST/log" | sed 's/^mxdraft: error: //')
    case $1 in
    3 | 4 | 5 | 6) fail "$1" "$2 on the device: $reason" ;;
    132) fail 3 "$2 on the device: illegal instruction; this CPU is not one of target $(field target)" ;;
    137) fail 4 "$2 on the device was killed, most likely for want of memory" ;;
    *) fail 5 "$2 on the device ended with $1: $reason" ;;
    esac
}

# ---- switch ----

# Point link $1 to release $2. rename(2) leaves the old link or the new one, never none.
point() {
    ln -sfn "releases/$2" "$DEST/$1.new" && mv -T "$DEST/$1.new" "$DEST/$1" ||
        fail 6 "cannot write to $DEST; the release before is still the current one"
}

switch_to() {
    old=$(release_of current)
    [ "$old" = "$1" ] && return 0
    install_service
    [ -z "$old" ] || point previous "$old"
    point current "$1"
    sync
    restart_service
}

# Before the switch, for the units name only DEST/current. A failure leaves the service that is there as it was.
install_service() {
    [ "$SERVICE" = yes ] || return 0
    was=$(kind_of "$(unit_path mxdraft.socket)")
    start_units "$release" && return 0
    if [ "$was" = file ] && [ -e "$DEST/current/mxdraft.socket" ]; then start_units "$DEST/current"; fi
    fail 6 "systemd refused mxdraft.socket, or its files could not be written, or its port is taken:" \
        "see systemctl status mxdraft.socket"
}

# Install the units of folder $1, a release, and make the socket listen with them. A socket cannot change while the
# service runs, which starts again with the next connection.
start_units() {
    for unit in $UNITS; do
        file=$(unit_path "$unit")
        sed "s|@DEST@|$DEST|g" "$1/$unit" >"$DEST/unit" && as_root mkdir -p "${file%/*}" &&
            as_root cp "$DEST/unit" "$file.new" && as_root mv "$file.new" "$file" || return 1
    done
    rm -f "$DEST/unit"
    as_root systemctl daemon-reload && as_root systemctl enable mxdraft.socket &&
        as_root systemctl stop mxdraft.service && as_root systemctl restart mxdraft.socket
}

# Tell whether the service that is installed is that of DEST.
has_service() { grep -qsF "ExecStart=$DEST/current/mxdraft serve " "$(unit_path mxdraft.service)"; }

# Let the service go on with the new release. Answers that it is giving break off; connections wait meanwhile.
restart_service() {
    has_service || return 0
    as_root systemctl try-restart mxdraft.service ||
        note "the service goes on with the release before: sudo systemctl restart mxdraft.service"
}

# Delete what deployments put into folder $1, a release, and the folder, unless somebody else's files are in it.
delete_release() {
    [ "$(kind_of "$1")" = folder ] || return 0
    for entry in "$1"/*; do
        case $(readlink "$entry") in ../../store/*) rm -f "$entry" ;; esac
    done
    rm -f "$1/manifest"
    rmdir "$1" 2>/dev/null || note "kept $1: it has files that no deployment made"
}

# Delete releases that are neither current nor previous, and files that no release needs: only what has the names that
# deployments give.
clean() {
    current=$(release_of current)
    previous=$(release_of previous)
    for folder in "$DEST"/releases/*; do
        id=${folder##*/}
        is_hex "${id%.new}" 16 && [ "$(kind_of "$folder")" = folder ] || continue
        case $id in
        "$current" | "$previous") ;;
        *.new) delete_release "$folder" ;;
        *)
            is_release "$id" || continue
            delete_release "$folder.new"
            mv -T "$folder" "$folder.new" && delete_release "$folder.new"
            ;;
        esac
    done
    for file in "$DEST"/store/*; do
        name=${file##*/}
        is_hex "${name%.part}" 64 && [ "$(kind_of "$file")" = file ] || continue
        grep -qs "^file $name " "$DEST"/releases/*/manifest || rm -f "$file"
    done
}

# ---- actions ----

prove() {
    check_files
    make_release
    prove_release
}

switch() {
    make_release
    switch_to "${release##*/}"
    clean
    echo "release ${release##*/}"
}

rollback() {
    check_ours
    take_lock
    before=$(release_of previous)
    [ -n "$before" ] && [ "$before" != "$(release_of current)" ] ||
        fail 3 "there is no release before the current one in $DEST"
    is_release "$before" || fail 3 "the release before is incomplete: deploy it again"
    MANIFEST=$(cat "$DEST/releases/$before/manifest")
    check_manifest
    prove
    switch_to "$before"
    echo "release $before"
}

status() {
    check_ours
    [ -n "$(release_of current)" ] || fail 3 "nothing is deployed in $DEST"
    [ -x "$DEST/current/mxdraft" ] && [ -e "$DEST/current/model.mxb" ] || fail 3 "the current release is incomplete: deploy again"
    echo "release $(release_of current)"
    echo "previous $(release_of previous)"
    grep -E '^(version|target|bundle|digest) ' "$DEST/current/manifest"
    if has_service; then
        echo "service $(systemctl is-active mxdraft.socket </dev/null)"
        echo "health $(health)"
    fi
}

# Ask the service, which starts it if it does not run.
health() {
    address=$(sed -n 's/^ListenStream=//p' "$(unit_path mxdraft.socket)")
    if command -v curl >/dev/null 2>&1; then
        answer=$(curl -sS -m 60 "http://$address/health" 2>&1 </dev/null)
    elif command -v wget >/dev/null 2>&1; then
        answer=$(timeout 60 wget -q -O - "http://$address/health" 2>&1 </dev/null)
    else
        echo "unknown: this device has neither curl nor wget"
        return
    fi
    case $answer in '{"status":"ok"}') echo ok ;; *) echo "no answer: $answer" ;; esac
}

install() {
    here=$(cd "$(dirname -- "$0")" && pwd)
    MANIFEST=$(cat "$here/manifest") || fail 3 "no manifest beside install.sh: unpack the archive again"
    check_all
    make_folders
    take_lock
    list_missing | while read -r _ sha _ name; do
        cp "$here/$name" "$DEST/store/$sha.part" || fail 6 "cannot copy $name to $DEST/store"
    done || exit
    prove
    switch
    echo "try: $DEST/current/mxdraft chat -m $DEST/current/model.mxb"
}

usage() { fail 2 "usage: install.sh [--dest DIR] [--service]"; }

# The arguments of install.sh.
parse() {
    ACTION=install DEST='' SERVICE=no NOW=''
    while [ $# -gt 0 ]; do
        case $1 in
        --service) SERVICE=yes ;;
        --dest)
            [ $# -ge 2 ] || usage
            DEST=$2
            shift
            ;;
        *) usage ;;
        esac
        shift
    done
    if [ -z "$DEST" ]; then
        if [ "$SERVICE" = yes ]; then DEST=/opt/mxdraft; else DEST=mxdraft; fi
    fi
}

[ "${1-}" = remote ] || parse "$@"
case $DEST in
/* | "~"*) ;;
*)
    [ -n "${HOME-}" ] || fail 2 "there is no home folder for --dest $DEST to be in: give an absolute path"
    DEST=$HOME/$DEST
    ;;
esac
case $ACTION in
hold)
    check_all
    make_folders
    take_lock
    list_missing
    echo "done"
    while read -r order; do # until the host closes its end, or dies; nothing but its orders is on stdin
        case $order in prove | switch) "$order" && echo "done" ;; esac
    done
    ;;
rollback | status | install) "$ACTION" ;;
*) fail 2 "unknown action $ACTION" ;;
esac
