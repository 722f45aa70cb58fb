# shellcheck shell=bash
# Sourced by prepare_wmt14_*.sh and prepare_wmt17_*.sh: where WMT's archives are, and what the three do alike.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

# fetch_wmt NAME…: the SHA-256 are those by which TensorFlow Datasets checks its downloads (its
# url_checksums/wmt*_translate.txt), the MD5 those of sacreBLEU's list of test sets.
fetch_wmt() {
    local name site=https://www.statmt.org wmt17=https://data.statmt.org/wmt17/translation-task
    for name in "$@"; do
        case $name in
            training-parallel-europarl-v7.tgz)
                fetch "$site/wmt13/$name" sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7 ;;
            training-parallel-commoncrawl.tgz)
                fetch "$site/wmt13/$name" sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5 ;;
            training-parallel-un.tgz)
                fetch "$site/wmt13/$name" sha256:29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47 ;;
            training-parallel-nc-v9.tgz)
                fetch "$site/wmt14/$name" sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485 ;;
            training-parallel-nc-v12.tgz)
                fetch "$wmt17/$name" sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2 ;;
            training-giga-fren.tar)
                fetch "$site/wmt10/$name" sha256:3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a ;;
            test-full.tgz) fetch "$site/wmt14/$name" md5:a8cd784e006feb32ac6f3d9ec7eb389a ;;
            dev.tgz) fetch "$wmt17/$name" md5:9b1aa63c1cf49dccdd20b962fe313989 ;;
            test.tgz) fetch "$wmt17/$name" md5:86a1724c276004aa25455ae2a04cef26 ;;
            UNv1.0.en-zh.tar.gz) # the copy of TensorFlow Datasets: the United Nations give it in two parts
                fetch "https://storage.googleapis.com/tfds-data/downloads/uncorpus/$name" \
                    sha256:6f9c6401d5f0a49b20661324570d99fb86822d82f974748a361e19b9b886dd49 ;;
            casia2015.zip) fetch_cwmt "$name" c939f1528f96c419e9bbffb9caad869616a969e7704ffac896e245a02aff59a9 ;;
            casict2011.zip) fetch_cwmt "$name" 606adc0ccc5d8fc7c47f8589991286616342a1a379a571ce3038918731ae0182 ;;
            casict2015.zip) fetch_cwmt "$name" eef8e25b297c1aff12ab24719247d3588e756d7a4e2c30d4d34fcb4d05ab1050 ;;
            datum2015.zip) fetch_cwmt "$name" 654afce6731485c40ce856514ab80cd2bfd836126bcaf48cdb911ebc32b021a4 ;;
            datum2017.zip) fetch_cwmt "$name" 737455c139596f4abf3b1da73bc38932b3ef9534549328eff47d867e29950ed2 ;;
            neu2017.zip) fetch_cwmt "$name" 9f63020b6990cde85f5387b745e3ae37f1d6a49848b90a49bae28219fb65395f ;;
            *) die "no such archive: $name" ;;
        esac
    done
}

# fetch_cwmt NAME SHA256: what the user has put there, or a mirror has.
fetch_cwmt() {
    if ((!GIVEN_DATA)) && [[ -z $MIRROR && ! -f $DATA/$1 ]]; then
        die "no file $DATA/$1: CWMT's corpora have no lasting address, put its zips there or say --without-cwmt"
    fi
    fetch "$1" "sha256:$2"
}

# take_option NAME: whether it is among OPTIONS; it is taken out.
take_option() {
    local option rest=() found=1
    for option in "${OPTIONS[@]}"; do
        if [[ $option == "$1" ]]; then found=0; else rest+=("$option"); fi
    done
    OPTIONS=("${rest[@]}")
    return $found
}

# given NAME "$@": whether an argument is among those of the script.
given() {
    local argument
    for argument in "${@:2}"; do
        if [[ $argument == "$1" ]]; then return 0; fi
    done
    return 1
}

# room DATA_GIB OUT_GIB: the archives' and everything's.
room() {
    if ((!GIVEN_DATA)); then need_disk "$1" "$DATA"; fi
    need_disk "$2" "$OUT"
}

# prepare_task TASK NAME…: check the options, fetch the archives, prepare.
prepare_task() {
    local arguments=("$1" --data "$DATA" --out "$OUT" --workers "$WORKERS" "${OPTIONS[@]}")
    shift
    prepare data.wmt "${arguments[@]}" --check-options
    fetch_wmt "$@"
    prepare data.wmt "${arguments[@]}"
}
