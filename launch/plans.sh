#!/usr/bin/env bash
# Plans every model of configs/small.py on every machine, on both data sets, with all
# weights and with adapters, and Qwen2.5-7B on eight GPUs; prints the tables of
# launch/PLANS.md. A plan takes one to six minutes on two cores, all of them about
# five hours; what is in runs/plans is not planned again.
#
#   launch/plans.sh [NAME ...]    such as qwen2_5_1_5b,gpu24,lora,dapo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh cpu plan

readarray -t all < <(.venv/bin/python -c '
from configs import small
for data in "", ",dapo":
  for machine in small.MACHINES:
    for model in small.MODELS:
      print(f"{model},{machine}{data}\n{model},{machine},lora{data}")
print("qwen2_5_7b,h100x8\nqwen2_5_7b,h200x8")')
(($#)) || set -- "${all[@]}"

mkdir -p runs/plans
for name in "$@"; do
  [[ ! -s runs/plans/$name.json ]] || continue
  IFS=, read -r model machine _ <<<"$name"
  config=configs/small.py:$name topology=$machine prompt=96  # of GSM8K
  if [[ $model == qwen2_5_7b ]]; then
    config=configs/qwen2_5_7b.py:tepo prompt=81
  else
    topology=$(.venv/bin/python -c "
from configs import small; print(small.MACHINES['$machine'][0])")
  fi
  [[ $name != *,dapo* ]] || prompt=81
  echo "launch/plans.sh: $name" >&2
  # Status 2 if it does not fit, which the table then says.
  .venv/bin/python -m tepo_jax.plan --config="$config" --topology="$topology" \
    --config.model="tests/tools/plan/models/$model" --prompt_tokens="$prompt" \
    --brief --json \
    >"runs/plans/$name.new" 2>"runs/plans/$name.log" \
    || [[ $? -eq 2 && -s runs/plans/$name.new ]] \
    || { tail -n 1 "runs/plans/$name.log" >&2; exit 1; }
  mv "runs/plans/$name.new" "runs/plans/$name.json"
done

.venv/bin/python - "$@" <<'EOF'
import json, re, sys

from configs import qwen2_5_7b, small


def seconds_text(seconds):
  return f'{seconds:.1f}' if seconds < 9.95 else f'{seconds:.0f}'


def cells(name, plan):
  """GiB of the program that needs most, slots, seconds of a step, hours."""
  most = max(plan['programs'], key=lambda p: (bool(p['failure']), p['hbm']))
  needed = f'{most["hbm"] / 2**30:.1f}'
  if most['failure']:  # by the TPU's compiler
    said = re.search(r'([\d.]+)G', most['failure'])
    needed = f'{float(said[1]):.1f}' if said else '?'
  needed += f' {most["name"].split()[0]}'
  if not plan['fits']:
    return [f'**{needed}**', '', 'does not fit', '']
  config = (qwen2_5_7b.get_config() if name.startswith('qwen2_5_7b')
            else small.get_config(name))
  step = sum(plan['seconds'].values())
  parts = ' + '.join(seconds_text(plan['seconds'][phase])
                     for phase in ('rollout', 'score', 'update'))
  return [needed, f'{plan["slots"]}', f'**{seconds_text(step)}** ({parts})',
          f'{config.steps * step / 3600:.1f}']


tables = {'GSM8K': {}, 'DAPO-Math': {}}
for name in sys.argv[1:]:
  plan = json.load(open(f'runs/plans/{name}.json'))
  model, machine, *options = name.split(',')
  data = 'GSM8K' if {model, *options}.isdisjoint(('qwen2_5_7b', 'dapo')) else (
      'DAPO-Math')
  row = tables[data].setdefault(
      (f'`{model},{machine}`', f'{plan["hbm_bytes"] / 2**30:.1f}'), {})
  row['lora' in options] = cells(name, plan)

columns = ['GiB', 'slots', 'step, s', 'run, h']
for data, rows in tables.items():
  if rows:
    head = [data, 'of GiB', *columns, *(f'lora: {c}' for c in columns)]
    print('\n| ' + ' | '.join(head) + ' |\n' + '|---' * len(head) + '|')
  for key, row in rows.items():
    found = [row.get(lora, [''] * len(columns)) for lora in (False, True)]
    print('| ' + ' | '.join([*key, *found[0], *found[1]]) + ' |')
EOF
