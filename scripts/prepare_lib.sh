# shellcheck shell=bash
# Sourced by the prepare_*.sh scripts: their common options, room on the disk, checked downloads.
#
#   prepare_options DATA OUT "$@"
#   check_options MODULE arguments …
#   need_disk GIB "$DATA" "$OUT"
#   fetch ADDRESS CHECKSUM [NAME]
#   prepare MODULE arguments …

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# prepare_options DEFAULT_DATA DEFAULT_OUT "$@": sets, from --data --out --mirror --workers,
#   DATA OUT     absolute folders; the defaults are relative to the checkout. Where the default of DATA lies in that of OUT
#                it goes with --out, so that everything is on the disk that was named
#   GIVEN_DATA   1 where --data names files that are there already: nothing is downloaded
#   MIRROR       address or absolute folder to take the files from, '' for their own addresses
#   WORKERS      number of processes
#   ANY_SIZE     1 with --any-size: data of another size than the published data, so other checksums are accepted too
#   OPTIONS      an array of all other arguments, --any-size among them
# and PY, the interpreter. --help shows the calling script's header.
prepare_options() {
    local default_data=$1 default_out=$2
    DATA='' OUT=$ROOT/$2 GIVEN_DATA=0 MIRROR='' ANY_SIZE=0 OPTIONS=()
    WORKERS=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc heeds them, but they are about threads
    shift 2
    while [[ $# -gt 0 ]]; do
        case $1 in
            -h | --help) usage; exit 0 ;;
            --data | --out | --mirror | --workers)
                [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"
                case $1 in
                    --data) DATA=$(absolute "$2") GIVEN_DATA=1 ;;
                    --out) OUT=$(absolute "$2") ;;
                    --mirror) if [[ $2 == *://* ]]; then MIRROR=${2%/}; else MIRROR=$(absolute "$2"); fi ;;
                    --workers)
                        [[ $2 =~ ^[1-9][0-9]*$ ]] || die "--workers must be a positive number, got $2"
                        WORKERS=$2
                        ;;
                esac
                shift
                ;;
            --any-size) ANY_SIZE=1 OPTIONS+=("$1") ;;
            *) OPTIONS+=("$1") ;;
        esac
        shift
    done
    if [[ -z $DATA ]]; then
        case $default_data in
            "$default_out"/*) DATA=$OUT/${default_data#"$default_out"/} ;;
            *) DATA=$ROOT/$default_data ;;
        esac
    fi
    ((!GIVEN_DATA)) || [[ -z $MIRROR ]] || die "--data and --mirror exclude one another"
    ((!GIVEN_DATA)) || [[ -d $DATA ]] || die "--data: no folder $DATA"
    use_python
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the work is divided among processes
    export DATA OUT GIVEN_DATA MIRROR WORKERS ANY_SIZE
}

# need_disk GIB FOLDER…: end here unless every folder's file system can take so much; what the folders hold already counts.
need_disk() {
    local gib=$1 folder there free have=0
    shift
    if ((ANY_SIZE)); then return; fi # the published data are meant
    for folder in "$@"; do
        if [[ -d $folder ]]; then have=$((have + $(du -sk -- "$folder" | cut -f 1))); fi
    done
    for folder in "$@"; do
        there=$folder
        while [[ ! -d $there ]]; do there=$(dirname -- "$there"); done
        free=$(df -Pk -- "$there" | awk 'NR == 2 { print $4 }')
        awk -v gib="$gib" -v free="$free" -v have="$have" 'BEGIN { exit gib * 1048576 > free + have }' ||
            die "needs $gib GiB in $folder, $(awk -v k="$free" 'BEGIN { printf "%.1f", k / 1048576 }') are free"
    done
}

# digest KIND FILE: KIND is sha256, md5, text (SHA-256 of the text inside a .gz, which does not change with the packing) or
# blob (the name git gives to the content, by which a file in a repository is known without having it).
digest() {
    case $1 in
        sha256 | md5) "$1sum" <"$2" ;;
        text) gzip -dc -- "$2" 2>/dev/null | sha256sum || true ;;
        blob) { printf 'blob %s\0' "$(stat -c %s -- "$2")"; cat -- "$2"; } | sha1sum ;;
        *) die "no such kind of checksum: $1" ;;
    esac | cut -d ' ' -f 1
}

# is_right FILE CHECKSUM NAME: whether FILE, to be called NAME, is the file expected; if not, `wrong` says why.
is_right() {
    local found
    if [[ $2 == record ]]; then
        # exit_status's line is the reason; a plain text has nothing to be checked but that it is there
        wrong=$("$PY" -m lightconv_plugin.recipes.data.archives "$1" "$3" 2>&1) && return
        wrong=${wrong#*error: }
        return 1
    else
        found=$(digest "${2%%:*}" "$1")
        wrong="its checksum is $found, expected ${2#*:}"
        [[ $found == "${2#*:}" ]]
    fi
}

# transfer ADDRESS FILE: goes on where FILE ends, as often as more of it comes; status 1 when no more does.
transfer() {
    local address=$1 file=$2 code status before=-1 size idle=0
    # A connection without a byte for a minute is dead. Retries are ours: curl's own throw away what a dead one has brought.
    local curl=(curl -fL --proto '=http,https' --connect-timeout 20 --speed-limit 1 --speed-time 60 --progress-bar)
    while true; do
        status=0
        code=$("${curl[@]}" -w '%{http_code}' -C - -o "$file" -- "$address") || status=$?
        case $status in
            0) return ;;
            23) die "cannot write $file: is the disk full? What is there is kept, the same command continues" ;;
            22 | 33) # refused: a part that cannot be resumed (no ranges, or another file) is started over
                case $code in
                    408 | 429 | 5??) ;;
                    *)
                        [[ -s $file ]] || return 1
                        rm -f -- "$file"
                        continue
                        ;;
                esac
                ;;
        esac
        size=$(stat -c %s -- "$file" 2>/dev/null || echo 0)
        if ((size > before)); then idle=0; fi
        before=$size
        ((++idle <= 3)) || return 1
        sleep "$idle"
    done
}

# download ADDRESS FILE CHECKSUM: fetch a file unless it is there and right. It is given its name only when it is whole and
# right, and an interrupted transfer goes on where it stopped. ADDRESS may be a local path. `record` instead of a checksum:
# the archive is read through.
download() {
    local address=$1 file=$2 checksum=$3 part=$2.part wrong='' lock
    if [[ -f $file ]] && is_right "$file" "$checksum" "$file"; then return; fi
    mkdir -p -- "$(dirname -- "$file")"
    exec {lock}<"$(dirname -- "$file")"
    flock -n "$lock" || die "another process is downloading to $(dirname -- "$file")"
    if [[ $address != *://* ]]; then
        [[ -f $address ]] || die "no file $address"
        cp --reflink=auto -- "$address" "$part" || die "cannot copy $address to $part"
    else
        command -v curl >/dev/null || die "curl is needed to download $address (on Debian: apt install curl)"
        # Without any checksum, nothing would tell a part of this file from one of another.
        if [[ $checksum == record && ! $file =~ \.(gz|tgz|bz2|tbz2?|xz|txz|zip|tar)$ ]]; then rm -f -- "$part"; fi
        local resumed=0
        if [[ -s $part ]]; then resumed=1; fi
        say "downloading $address"
        while true; do
            transfer "$address" "$part" ||
                die "cannot download $address: without a network, put the files into a folder and give it by --data"
            if ((!resumed)) || is_right "$part" "$checksum" "$file"; then break; fi
            resumed=0
            rm -f -- "$part"
        done
    fi
    if ! is_right "$part" "$checksum" "$file"; then
        rm -f -- "$part"
        die "$address is not the expected file: $wrong"
    fi
    mv -- "$part" "$file"
    exec {lock}>&-
}

# fetch ADDRESS CHECKSUM [NAME]: have $DATA/NAME (default: the address's last part), whole and right. CHECKSUM is KIND:HEX of
# `digest`, or `record`: then the archive is read through, the SHA-256 of the first download is written to $DATA/SHA256SUMS,
# and that one is enforced from then on.
fetch() {
    local address=$1 checksum=$2 name=${3:-${1##*/}} known='' wrong=''
    local file=$DATA/$name sums=$DATA/SHA256SUMS
    if ((ANY_SIZE)); then checksum=record; fi
    if [[ $checksum == record && -f $sums ]]; then
        known=$(awk -v name="$name" 'substr($0, 67) == name { print $1; exit }' "$sums")
    fi
    if ((GIVEN_DATA)); then
        [[ -f $file ]] || die "no file $file: --data is a folder with the files as they are published"
        is_right "$file" "${known:+sha256:}${known:-$checksum}" "$file" || die "$file is not the expected file: $wrong"
        return
    fi
    if [[ -n $MIRROR ]]; then address=$MIRROR/$name; fi
    download "$address" "$file" "${known:+sha256:}${known:-$checksum}"
    if [[ $checksum == record && -z $known ]]; then
        printf '%s  %s\n' "$(digest sha256 "$file")" "$name" >>"$sums"
    fi
}

# check_options MODULE arguments …: end here if the Python part would refuse them, before anything is fetched for it.
check_options() {
    local parse='import importlib, sys; sys.argv = sys.argv[1:]
importlib.import_module("lightconv_plugin.recipes." + sys.argv[0]).parse()'
    "$PY" -c "$parse" "$@"
}

# prepare MODULE arguments …: the Python part of a preparation.
prepare() { "$PY" -m "lightconv_plugin.recipes.$1" "${@:2}"; }
