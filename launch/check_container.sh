#!/usr/bin/env bash
# Builds packaging/Containerfile with buildah, which needs no daemon, starts the image and sends it a request. Needs
# root and Linux; the container has its own network and process ids.
#
#   launch/check_container.sh [--base IMAGE] [--mlx cpu|cuda|cuda13] [--image NAME]
#
# --base: instead of the public base image. --image: an image that is already built, which is not removed at the end.
# With CUDA only the build is checked, because its MLX needs a driver.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

base="" mlx=cpu image="" container="" key=container-check
while [ "$#" -gt 0 ]; do
    [ "$#" -gt 1 ] || fail "$1 needs a value"
    case "$1" in
        --base) base="$2" ;;
        --mlx) mlx="$2" ;;
        --image) image="$2" ;;
        --inside) container="$2" ;;
        *) fail "there is no flag $1; expected --base, --mlx or --image" ;;
    esac
    shift 2
done
command -v buildah >/dev/null || fail "buildah is needed (Debian, Ubuntu: apt install buildah)"
export BUILDAH_ISOLATION=chroot

# of_image WHAT: the words of a list in the image's configuration, one a line.
of_image() {
    buildah inspect "$container" | python3 -c 'import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
print("\n".join({"entrypoint": config["Entrypoint"], "health": config["Healthcheck"]["Test"][1:]}[sys.argv[1]]))' "$1"
}

ask() { # ask KEY: the first question
    buildah run "$container" -- python3 -c '
import json, sys, urllib.error, urllib.request
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {sys.argv[1]}"}
asked = json.dumps({"prompt": "def fibonacci(n):", "max_tokens": 24, "seed": 1}).encode()
try:
    print(urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8080/v1/completions", asked, headers)).read().decode())
except urllib.error.HTTPError as error:
    raise SystemExit(f"{error.code} {error.read().decode()}")' "$1"
}

if [ -n "$container" ]; then # in the namespaces
    ip link set lo up
    mapfile -t entrypoint < <(of_image entrypoint)
    mapfile -t health < <(of_image health)
    say "user: $(buildah run "$container" -- id -u)"
    if said="$(buildah run "$container" -- "${entrypoint[@]}" 2>&1)"; then fail "it started without an API key"; fi
    say "without a key: $(echo "$said" | head -n 1)"
    buildah run --env OUTRIDER_API_KEY="$key" "$container" -- "${entrypoint[@]}" >&2 &
    for _ in $(seq 120); do
        if buildah run "$container" -- "${health[@]}" >/dev/null 2>&1; then break; fi
        sleep 1
    done
    buildah run "$container" -- "${health[@]}" >/dev/null || fail "it is not healthy after 120 tries"
    if said="$(ask wrong 2>&1)"; then fail "a wrong key was let in"; fi
    say "a wrong key: $(echo "$said" | head -n 1)"
    for _ in $(seq 60); do # /health answers before models are loaded
        if said="$(ask "$key" 2>&1)"; then break; fi
        sleep 1
    done
    printf '%s\n' "$said"
    case "$said" in *'"choices"'*) exit 0 ;; *) fail "the first question has no answer" ;; esac
fi

if [ -z "$image" ]; then
    image=outrider-check
    options=(--format docker --build-arg "MLX=$mlx" --file "$root/packaging/Containerfile" --tag "$image")
    [ -z "$base" ] || options+=(--build-arg "BASE=$base")
    buildah build "${options[@]}" "$root" >&2
fi
clean_up() {
    [ -z "$container" ] || buildah rm "$container" >/dev/null
    [ "$image" != outrider-check ] || buildah rmi "$image" >/dev/null
}
trap clean_up EXIT
say "image: $(buildah images --format '{{.Size}}' "$image")"
case "$mlx" in cuda*) exit 0 ;; esac
container="$(buildah from --ulimit nofile=8192:8192 "$image")" # buildah's default is too low
unshare --net --pid --fork --mount-proc "${BASH_SOURCE[0]}" --inside "$container"
