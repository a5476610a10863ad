# What `oeprov adopt` runs on a host, which may lack a Python: POSIX sh. The functions come first; the line that
# calls one is appended (provision/hosts/first_login.py). Nothing here is secret: passwords come on standard input.
set -u
LC_ALL=C PATH=$PATH:/usr/sbin:/sbin:/usr/bin:/bin
export LC_ALL PATH
umask 022

say() { printf 'oeprov:%s=%s\n' "$1" "$2"; }

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

# Facts of the host and of the user who is logged in, one `oeprov:NAME=VALUE` per line. Arguments: Pythons.
observe() {
    say uid "$(id -u)"
    say user "$(id -un)"
    say hostname "$(uname -n)"
    say machine "$(cat /etc/machine-id 2>/dev/null)"
    say boot "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
    if [ "$(id -u)" = 0 ]; then
        command -v sudo >/dev/null 2>&1 && say sudo works || say sudo missing
    elif ! command -v sudo >/dev/null 2>&1; then
        say sudo missing
    elif said=$(sudo -k -n true 2>&1 </dev/null); then
        say sudo works
    else
        say sudo "$(printf %s "$said" | tail -n 1)"
    fi
    for name in apt-get dnf yum; do
        command -v "$name" >/dev/null 2>&1 && say manager "$name" && break
    done
    for python in "$@"; do
        if command -v "$python" >/dev/null 2>&1; then
            say "python $python" "$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)"
            continue
        fi
        for path in "/usr/local/bin/$python" "/usr/bin/$python" "$python"; do
            [ ! -L "$path" ] || say broken "$path -> $(readlink "$path")"
        done
    done
    say end yes
}

# Add the public key $1 to the user's own authorized_keys.
install_key() {
    directory=$HOME/.ssh file=$HOME/.ssh/authorized_keys
    [ -n "$HOME" ] && [ -d "$HOME" ] || fail "the home directory ${HOME:-(none)} is missing: make it"
    [ -d "$directory" ] || mkdir -m 700 "$directory" || exit 1
    [ -e "$file" ] || (umask 077 && : >"$file") || exit 1
    if ! grep -qxF -e "$1" "$file"; then
        # A last line without an end would swallow the key.
        [ -z "$(tail -c 1 "$file")" ] || echo >>"$file" || exit 1
        printf '%s\n' "$1" >>"$file" || exit 1
    fi
    # sshd ignores files that others may write to.
    chmod go-w "$directory" "$file" || exit 1
    ! command -v restorecon >/dev/null 2>&1 || restorecon -R "$directory" || :
}

# Write the file $1 of /etc/sudoers.d with the text $2, if sudo accepts it; as root.
install_sudoers() {
    if [ -e /etc/sudoers ]; then
        # A comment in older releases, although it counts.
        grep -Eq '^[@#]includedir[[:space:]]+/etc/sudoers\.d' /etc/sudoers ||
            fail "/etc/sudoers does not read /etc/sudoers.d: add the line @includedir /etc/sudoers.d"
    fi
    [ -d /etc/sudoers.d ] || mkdir -m 750 /etc/sudoers.d || exit 1
    # sudo skips names with a dot. Another controller may write one at the same time.
    new=/etc/sudoers.d/$1.new.$$
    (umask 226 && printf '%s' "$2" >"$new") || exit 1
    if command -v visudo >/dev/null 2>&1 && ! said=$(visudo -c -f "$new" 2>&1); then
        rm -f "$new"
        fail "visudo refuses the line: $(printf %s "$said" | head -n 1)"
    fi
    mv -f "$new" "/etc/sudoers.d/$1" || exit 1
}

# Install the package sudo; as root. $1: the package manager, $2: seconds to wait for others' locks.
install_sudo() {
    export DEBIAN_FRONTEND=noninteractive
    end=$(($(date +%s) + $2))
    while :; do
        case $1 in
        apt-get)
            said=$({ apt-get update && apt-get install -y --no-install-recommends sudo; } </dev/null 2>&1)
            ;;
        *) said=$("$1" --setopt=exit_on_lock=True install -y sudo </dev/null 2>&1) ;;
        esac && return
        code=$?
        case $said in
        *"Could not get lock"* | *"Unable to lock"*) ;;
        *) [ "$code" = 200 ] || fail "$1: $(printf %s "$said" | grep -iE '^E:|error|fail' | head -n 2 | tr '\n' ' ')" ;;
        esac
        if [ "$(date +%s)" -ge "$end" ]; then
            holder=$(printf %s "$said" | grep -oiE 'process (with pid )?[0-9]+( \([^)]*\))?' | head -n 1)
            fail "$1 was locked for more than $2 s by ${holder:-another process}: wait for it and run this again"
        fi
        sleep 3
    done
}
