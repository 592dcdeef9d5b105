#!/usr/bin/env bash
# What launch/tpu_vm.sh, which sources this, knows of a TYPE: its chips, hosts,
# software, list price and planned steps.
set -euo pipefail

chips() {
  case $TYPE in
    tpu7x-* | v5p-* | v4-* | v3-* | v2-*) echo $(( ${TYPE##*-} / 2 )) ;;
    *) echo "${TYPE##*-}" ;;
  esac
}

# Eight chips of a v5e or v6e are one host.
hosts() {
  local per_host=4
  [[ ! $TYPE =~ ^(v5litepod|v6e)-[1-8]$ ]] || per_host=8
  echo $(( ($(chips) + per_host - 1) / per_host ))
}

# counted NUMBER WORD: 1 chip, 2 chips.
counted() { if [[ $1 == 1 ]]; then echo "1 $2"; else echo "$1 $2s"; fi; }

# warn_of_cost ['WHAT stays']
warn_of_cost() {
  local count='' dollars='' billed='chips are'
  if [[ ${TYPE:-} =~ -[0-9]+$ ]]; then
    count=$(chips)
    case $TYPE in  # list prices of a chip-hour in the US, in cents, of 2026
      v6e-*) dollars=270 ;;
      v5p-*) dollars=420 ;;
      v5litepod-*) dollars=120 ;;
    esac
    billed="$count chips are"
    [[ $count != 1 ]] || billed='1 chip is'
    [[ -z $dollars ]] || dollars=" (about \$$(((count * dollars + 50) / 100)) an hour \
at list price${SPOT:+, less with SPOT=1})"
  fi
  say "${1:-the slice stays}, and its $billed billed$dollars until you run" \
    "launch/tpu_vm.sh delete"
}

# done_with WHAT COMMAND: says what holds, what it costs, and what comes next.
done_with() {
  [[ -z $dry_run ]] || return 0
  warn_of_cost
  say "$1; next: launch/tpu_vm.sh $2"
}

# A row per TYPE: TYPE, topology, and the machine's name in launch/PLANS.md, if any.
rows='v6e-1=v6e:1x1=v6e1 v6e-4=v6e:2x2 v6e-8=v6e:2x4 v6e-16=v6e:4x4=v6e16
  v6e-32=v6e:4x8=v6e32 v6e-64=v6e:8x8 v6e-128=v6e:8x16 v6e-256=v6e:16x16
  v5litepod-1=v5e:1x1=v5e1 v5litepod-4=v5e:2x2 v5litepod-8=v5e:2x4=v5e8
  v5litepod-16=v5e:4x4 v5litepod-32=v5e:4x8 v5litepod-64=v5e:8x8
  v5p-8=v5p:2x2x1 v5p-16=v5p:2x2x2 v5p-32=v5p:2x2x4=v5p16
  v5p-64=v5p:2x4x4=v5p32 v5p-128=v5p:4x4x4'

# The steps are those of launch/PLANS.md.
types() {
  local row topology name
  printf '%-14s %5s %5s  %-10s %s\n' TYPE chips hosts plan 'a step, planned'
  for row in $rows; do
    IFS='=' read -r TYPE topology name <<<"$row"
    printf '%-14s %5s %5s  %-10s %s\n' "$TYPE" "$(chips)" "$(hosts)" \
      "$topology" "$(planned "${name:-none}")"
  done
}

# GKE's labels of a node of TYPE; gke_topology fails if TYPE is none of ours.
gke_accelerator() {
  case $TYPE in
    v6e-*) echo tpu-v6e-slice ;;
    v5p-*) echo tpu-v5p-slice ;;
    v5litepod-*) echo tpu-v5-lite-podslice ;;
    tpu7x-*) echo tpu7x ;;
  esac
}

gke_topology() {
  local row
  for row in ${rows//v5p/tpu7x} $rows; do
    [[ $row != "$TYPE="* ]] || { cut -d= -f2 <<<"$row" | cut -d: -f2; return; }
  done
  return 1
}

# planned MACHINE: the seconds of a step of each row `MODEL,MACHINE` of PLANS.md, from
# its column "step", or if the model fits only with LoRA, "lora: step"; of a model's
# first row.
planned() {
  awk -F ' *[|] *' -v machine="$1" '
    /^[|][-|]+$/ { full = lora = 0
      for (i = 1; i <= n; i++) {
        if (head[i] ~ /^step/) full = i
        if (head[i] ~ /^lora: step/) lora = i } }
    { n = split($0, head, / *[|] */) }
    $2 ~ ("^`[a-z0-9_]+," machine "`") && full && !seen[$2]++ {
      split($2, model, /[`,]/)
      with = $2 ~ /lora/ ? " with LoRA" : ""; step = $full
      if (lora && step !~ /^[*]*[0-9]/) { with = " with LoRA"; step = $lora }
      if (step ~ /^[*]*[0-9]/) {
        gsub(/ *[(].*|[*]/, "", step)
        found = found "; " model[2] with ": " step " s" } }
    END { print substr(found, 3) }' launch/PLANS.md
}

check_type() {
  [[ -n ${TYPE:-} ]] || fail "TYPE is not set, for example TYPE=v6e-16;" \
    "launch/tpu_vm.sh types prints them"
  [[ $TYPE != v5e-* ]] \
    || fail "TYPE=$TYPE: gcloud's name is v5litepod-${TYPE#v5e-}"
  [[ ! ${TYPE,,} =~ ^(tpu)?-?v?7x ]] || fail "TYPE=$TYPE: the Cloud TPU API" \
    "has no TPU7x; use GKE, see launch/CONTAINERS.md"
  [[ $TYPE =~ ^[a-z0-9]+-[0-9]+$ ]] || fail "TYPE=$TYPE: not like v6e-16;" \
    "launch/tpu_vm.sh types prints them"
  [[ ${CREATE_FLAGS:-} != *--node-count* ]] || fail "CREATE_FLAGS:" \
    "--node-count: several slices are not supported"
  say "$TYPE is $(counted "$(chips)" chip) on $(counted "$(hosts)" host)"
}

software() {
  case $TYPE in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}
