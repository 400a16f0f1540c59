#!/usr/bin/env bash
# Writes a KubeRay RayJob that brings Ray up and calls the launcher, and submits it.
#
#   launchers/kuberay.sh --image IMAGE --claim VOLUME --nodes 8 --gpus 4 -- \
#     --model-name GLM-5.3-Flash --run-dir /shared/runs/first ...
#
# Everything after `--` goes to `train`. `--show` prints the manifest and submits nothing.
# The image holds this package in its working directory; the claim is mounted on /shared.
set -euo pipefail

die() {
  echo "kuberay.sh: $*" >&2
  exit 2
}

show=false name=glm-lora image="" claim="" nodes=1 gpus=8
while (($#)); do
  case "$1" in
    --show) show=true ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
      exit 0
      ;;
    --name | --image | --claim | --nodes | --gpus)
      (($# > 1)) || die "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --) shift && break ;;
    *) die "unknown option '$1'; expected --name, --image, --claim, --nodes, --gpus, --show, --" ;;
  esac
  shift
done
[[ -n "$image" ]] || die "--image is missing"
[[ -n "$claim" ]] || die "--claim is missing"
# Plain words need no quotes in YAML; no name of an image or a claim has others.
[[ "$image" =~ ^[a-zA-Z0-9][a-zA-Z0-9._/:@-]*$ && "$image" != *: ]] ||
  die "--image is '$image'; expected the name of an image"
[[ "$claim" =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$ ]] ||
  die "--claim is '$claim'; expected the name of a volume claim"
[[ "$nodes" =~ ^[1-9][0-9]*$ ]] || die "--nodes is '$nodes'; expected a positive number"
[[ "$gpus" =~ ^[1-9][0-9]*$ ]] || die "--gpus is '$gpus'; expected a positive number"
[[ "$name" =~ ^[a-z0-9]([a-z0-9-]*[a-z0-9])?$ ]] || die "--name is '$name'; expected a DNS label"

entrypoint="python launchers/run_glm5_3_flash_lora.py train --launcher ray --ray-address auto"
entrypoint+=" --num-nodes $nodes --num-gpus-per-node $gpus"
for argument in "$@"; do
  case "${argument%%=*}" in
    --launcher | --ray-address | --num-nodes | --num-gpus-per-node)
      die "${argument%%=*} after -- would contradict the cluster; use --nodes and --gpus"
      ;;
  esac
  entrypoint+=" $(printf '%q' "$argument")"
done
# YAML in single quotes: only the quote itself is doubled.
entrypoint="${entrypoint//\'/\'\'}"

pod() {
  cat <<POD
          containers:
            - name: ray
              image: $image
              resources:
                limits:
                  nvidia.com/gpu: $gpus
                requests:
                  nvidia.com/gpu: $gpus
              volumeMounts:
                - {name: shared, mountPath: /shared}
                - {name: shm, mountPath: /dev/shm}
          volumes:
            - name: shared
              persistentVolumeClaim: {claimName: $claim}
            - name: shm
              emptyDir: {medium: Memory}
POD
}

manifest() {
  cat <<TOP
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: $name
spec:
  entrypoint: '$entrypoint'
  shutdownAfterJobFinishes: true
  backoffLimit: 0
  rayClusterSpec:
    headGroupSpec:
      rayStartParams: {}
      template:
        spec:
$(pod)
TOP
  ((nodes > 1)) || return 0
  cat <<WORKERS
    workerGroupSpecs:
      - groupName: workers
        replicas: $((nodes - 1))
        minReplicas: $((nodes - 1))
        maxReplicas: $((nodes - 1))
        rayStartParams: {}
        template:
          spec:
$(pod | sed 's/^/  /')
WORKERS
}

if $show; then
  manifest
else
  manifest | kubectl apply -f -
fi
