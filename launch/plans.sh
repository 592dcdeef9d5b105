#!/usr/bin/env bash
# Plans the paper's models on the slices that their configs name, Qwen2.5-7B on GPUs, and
# of configs/small.py all models on one GPU, on GSM8K and DAPO-Math, and the Qwen2.5
# models on the other machines, on GSM8K (on v5e1 the smallest); adapters on one GPU on
# GSM8K, and where all weights do not fit. Prints the tables of launch/PLANS.md. A plan
# takes one to ten minutes on two cores, all of them some three hours; a second time less
# than a minute each, as compiled programs are kept. The plans stay in runs/plans.
#
#   launch/plans.sh [NAME ...]    such as qwen2_5_1_5b,gpu24,lora,dapo
#   launch/plans.sh published     what others measured, compared with plans
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
launch/setup.sh cpu plan

if [[ ${1:-} == published ]]; then
  exec .venv/bin/python -c \
    'from tepo_jax.tools.plan import published; print(published.text())'
fi
list=$(.venv/bin/python -c '
from configs import small
print("qwen2_5_7b,v6e16\nr1_llama_8b,v5p16\nmistral_7b,v6e32\nqwen3_14b,v5p32\n"
      "qwen2_5_7b,v5e8,lora\nqwen2_5_7b,h100x1,lora\nqwen2_5_7b,h100x8\n"
      "qwen2_5_7b,h200x8")
for data in "", ",dapo":
  for machine in small.MACHINES:
    for model in small.MODELS:
      if machine in ("gpu24", "gpu80") or not data and "qwen2_5" in model and (
          machine != "v5e1" or model == "qwen2_5_0_5b"):
        print(f"{model},{machine}{data}")
        if machine in ("gpu24", "gpu80") and not data:
          print(f"{model},{machine},lora")')
readarray -t all <<<"$list"
(($#)) || set -- "${all[@]}"
# The paper's models are planned with the slices that their configs name.
declare -A slices=([v6e16]=v6e:4x4 [v6e32]=v6e:4x8 [v5p16]=v5p:2x2x4
  [v5p32]=v5p:2x4x4 [v5e8]=v5e:2x4)

mkdir -p runs/plans
names=("$@")
for ((i = 0; i < ${#names[@]}; i++)); do
  name=${names[i]}
  IFS=, read -r model machine _ <<<"$name"
  more=()
  if [[ $model =~ ^(qwen2_5_7b|r1_llama_8b|mistral_7b|qwen3_14b)$ ]]; then
    config=configs/$model.py:tepo prompt=81 topology=${slices[$machine]:-$machine}
    [[ $name != *,lora ]] || more=(--config.lora.rank=16)
    [[ $machine != h100x1 ]] || more+=(--config.rollout.tensor=1)
  else
    config=configs/small.py:$name prompt=96  # of GSM8K
    topology=$(.venv/bin/python -c "
from configs import small; print(small.MACHINES['$machine'][0])")
  fi
  [[ $name != *,dapo* ]] || prompt=81
  echo "launch/plans.sh: $name" >&2
  # Status 2 if it does not fit, which the table then says; adapters come next.
  status=0
  .venv/bin/python -m tepo_jax.plan --config="$config" --topology="$topology" \
    --config.model="tests/tools/plan/models/$model" --prompt_tokens="$prompt" \
    "${more[@]}" --brief --json \
    >"runs/plans/$name.new" 2>"runs/plans/$name.log" || status=$?
  ((status == 0)) || [[ $status -eq 2 && -s runs/plans/$name.new ]] \
    || { tail -n 1 "runs/plans/$name.log" >&2; exit 1; }
  ((status == 0)) || [[ $name == *,lora* || " ${names[*]} " == *" $name,lora "* ]] \
    || names=("${names[@]:0:i+1}" "$name,lora" "${names[@]:i+1}")
  mv "runs/plans/$name.new" "runs/plans/$name.json"
done

.venv/bin/python - "${names[@]}" <<'EOF'
import json, re, sys


def number(value):
  return f'{value:.1f}' if value < 9.95 else f'{value:.0f}'


def span(low, high):
  return f'{number(low)} to {number(high)}'


def cells(plan):
  """GiB of the program that needs most, slots, seconds of a step, hours."""
  most = max(plan['programs'], key=lambda p: (bool(p['failure']), p['hbm']))
  needed = f'{most["hbm"] / 2**30:.1f}'
  if most['failure']:  # by the TPU's compiler
    said = re.search(r'([\d.]+)G', most['failure'])
    needed = f'{float(said[1]):.1f}' if said else '?'
  needed += f' {most["name"].split()[0]}'
  if not plan['fits']:
    return [f'**{needed}**', '', 'does not fit', '']
  step = [sum(plan[bound].values()) for bound in ('low', 'mid', 'high')]
  parts = ' + '.join(number(plan['mid'][phase])
                     for phase in ('rollout', 'score', 'update'))
  hours = [(plan['run']['compilation'] + sum(
      plan['run'][part][bound] for part in ('steps', 'evaluations', 'saves')))
           / 3600 for bound in ('low', 'high')]
  return [needed, f'{plan["slots"]}',
          f'**{span(step[0], step[2])}**, {number(step[1])} ({parts})',
          span(*hours)]


paper = {'qwen2_5_7b', 'r1_llama_8b', 'mistral_7b', 'qwen3_14b'}
tables = {"The paper's models": {}, 'GSM8K': {}, 'DAPO-Math': {}}
for name in sys.argv[1:]:
  plan = json.load(open(f'runs/plans/{name}.json'))
  model, machine, *options = name.split(',')
  data = ("The paper's models" if model in paper else
          'DAPO-Math' if 'dapo' in options else 'GSM8K')
  row = tables[data].setdefault(
      (f'`{model},{machine}`', f'{plan["hbm_bytes"] / 2**30:.1f}'), {})
  row['lora' in options] = cells(plan)

columns = ['GiB', 'slots', 'step, s', 'run, h']
for data, rows in tables.items():
  if rows:
    head = [data, 'of GiB', *columns, *(f'lora: {c}' for c in columns)]
    print('\n| ' + ' | '.join(head) + ' |\n' + '|---' * len(head) + '|')
  for key, row in rows.items():
    found = [row.get(lora, [''] * len(columns)) for lora in (False, True)]
    print('| ' + ' | '.join([*key, *found[0], *found[1]]) + ' |')
EOF
