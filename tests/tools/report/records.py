"""Makes folders of runs as training writes them."""

import json

CONFIG = {
    'seed': 0, 'steps': 6, 'method_name': 'grpo', 'model': None,
    'method': {'weight': 'token', 'clip': {'name': 'ppo', 'low': 0.2}},
    'optimizer': {'learning_rate': 1e-5}}


def record(step, **changed):
  """Metrics of a step, for every figure."""
  return {
      'step': step, 'reward': 0.1 * step, 'accuracy': 0.1 * step,
      'entropy': 0.5 - 0.05 * step, 'grad_norm': 1.0, 'kl_k3': 1e-4,
      'clip_fraction_low': 0.01, 'clip_fraction_high': 0.02,
      'clip_fraction_covariance': 0.0, 'region_share': 0.0,
      'response_length_mean': 20.0, 'mixed_share': 0.9,
      'truncated_share': 0.0, 'logp_gap_mean': 1e-7, 'tokens_per_second': 1e3,
      'seconds/step': 2.0, 'skipped': 0, 'host/resident_bytes': 1e9,
      'host/open_files': 12, 'host/processes': 2, 'compilations': 0} | changed


def make_run(directory, name, lines, **changed):
  """Writes a run's folder with these records; returns its path.

  `changed`: config fields, with __ for dots.
  """
  folder = directory / name
  folder.mkdir(parents=True)
  config = json.loads(json.dumps(CONFIG))
  for dotted, value in changed.items():
    *sections, field = dotted.split('__')
    section = config
    for part in sections:
      section = section[part]
    section[field] = value
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'metrics.jsonl').write_text(
      ''.join(json.dumps(line) + '\n' for line in lines))
  return str(folder)
