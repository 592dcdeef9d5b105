#!/usr/bin/env bash
# Plans every model of configs/small.py on every machine, with all weights and
# with adapters, and Qwen2.5-7B on eight GPUs; prints the table of
# launch/README.md. A plan takes one to six minutes on two cores, the table
# about two hours; what is in runs/plans is not planned again.
#
#   launch/plans.sh [NAME ...]    such as qwen2_5_1_5b,gpu24,lora
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh cpu plan

readarray -t all < <(.venv/bin/python -c '
from configs import small
for machine in small.MACHINES:
  for model in small.MODELS:
    print(f"{model},{machine}\n{model},{machine},lora")
print("qwen2_5_7b,h100x8\nqwen2_5_7b,h200x8")')
(($#)) || set -- "${all[@]}"

mkdir -p runs/plans
for name in "$@"; do
  [[ ! -s runs/plans/$name.json ]] || continue
  IFS=, read -r model machine _ <<<"$name"
  config=configs/small.py:$name topology=$machine
  if [[ $model == qwen2_5_7b ]]; then
    config=configs/qwen2_5_7b.py:tepo
  else
    topology=$(.venv/bin/python -c "
from configs import small; print(small.MACHINES['$machine'][0])")
  fi
  echo "launch/plans.sh: $name" >&2
  # Status 2 if it does not fit, which the table then says.
  .venv/bin/python -m tepo_jax.plan --config="$config" --topology="$topology" \
    --config.model="tests/tools/plan/models/$model" --brief --json \
    >"runs/plans/$name.new" 2>"runs/plans/$name.log" \
    || [[ $? -eq 2 && -s runs/plans/$name.new ]] \
    || { tail -n 1 "runs/plans/$name.log" >&2; exit 1; }
  mv "runs/plans/$name.new" "runs/plans/$name.json"
done

.venv/bin/python - "$@" <<'EOF'
import json, re, sys

from configs import qwen2_5_7b, small

print('| plan | slots | GiB | of | rollout | score | updates | step, s | run, h |')
print('|---|---|---|---|---|---|---|---|---|')
for name in sys.argv[1:]:
  plan = json.load(open(f'runs/plans/{name}.json'))
  most = max(plan['programs'], key=lambda p: (bool(p['failure']), p['hbm']))
  cells = [f'{most["hbm"] / 2**30:.1f} ({most["name"].split()[0]})',
           f'{plan["hbm_bytes"] / 2**30:.1f}']
  if plan['fits']:
    seconds = plan['seconds']
    cells += [f'{seconds[phase]:.0f}' for phase in ('rollout', 'score')]
    step = sum(seconds.values())
    config = (qwen2_5_7b.get_config() if name.startswith('qwen2_5_7b')
              else small.get_config(name))
    cells += [f'{seconds["update"]:.0f}', f'{step:.0f}',
              f'{config.steps * step / 3600:.1f}']
  else:
    if most['failure']:  # by the TPU's compiler
      needed = re.search(r'([\d.]+)G', most['failure'])
      cells[0] = (f'{float(needed[1]):.1f} ' if needed else '') + (
          f'({most["name"].split()[0]})')
    cells += ['does not fit', '', '', '', '']
  print('|', ' | '.join([f'`{name}`', str(plan['slots']), *cells]), '|')
EOF
