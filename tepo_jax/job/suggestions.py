"""The field that a name of another library means: verl's, TRL's, OpenRLHF's.

A name that is spelt alike may mean something else: `group_size` is not
`rollout.prompts`.
"""

from collections.abc import Collection

# Field -> names of the same elsewhere. A name may have sections before it.
NAMES = {
    'steps': 'max_steps num_train_epochs total_epochs total_training_steps '
             'num_episodes num_steps train_steps total_steps',
    'seed': 'data_seed',
    'model': 'path model_name_or_path model_name model_path pretrain '
             'tokenizer_name_or_path',
    'data.name': 'train_files dataset_name dataset prompt_data train_file '
                 'train_data',
    'data.sets': 'prompt_probs prompt_data_probs',
    'data.max_prompt_tokens': 'max_prompt_length prompt_max_len '
                              'prompt_length',
    'data.limit': 'max_samples train_max_samples',
    'data.columns.problem': 'prompt_key input_key',
    'data.columns.answer': 'label_key ground_truth',
    'data.system': 'system_prompt',
    'data.template': 'apply_chat_template chat_template prompt_template',
    'rollout.prompts': 'train_batch_size rollout_batch_size batch_size '
                       'generation_batch_size '
                       'gen_batch_size prompts_per_step',
    'rollout.samples': 'n group_size num_generations n_samples_per_prompt '
                       'rollout_n num_samples samples_per_prompt g',
    'rollout.max_tokens': 'max_response_length max_new_tokens '
                          'max_completion_length generate_max_len '
                          'response_length max_length max_gen_len '
                          'max_tokens_to_generate',
    'rollout.stop': 'stop stop_strings stop_sequences',
    'rollout.stop_ids': 'stop_token_ids',
    'rollout.slots': 'max_num_seqs gpu_memory_utilization '
                     'vllm_gpu_memory_utilization micro_rollout_batch_size '
                     'rollout_micro_batch_size',
    'rollout.tensor': 'vllm_tensor_parallel_size gen_tp',
    'rollout.dynamic_sampling': 'filter_groups enable_filter_groups '
                                'dynamic_filtering',
    'rollout.max_generation_batches': 'max_num_gen_batches',
    'rollout.mixed': 'filter_groups.metric filter_groups_metric',
    'rollout.truncated': 'mask_truncated_completions overlong_filter '
                         'overlong_filtering',
    'rollout.overlong_buffer': 'overlong_buffer_len overlong_buffer.len',
    'rollout.overlong_factor': 'penalty_factor overlong_penalty_factor',
    'reward.functions': 'reward_funcs reward_fn reward_func reward_function '
                        'custom_reward_function reward_manager reward_model '
                        'reward_fns',
    'reward.weights': 'reward_weights',
    'train.minibatch_prompts': 'ppo_mini_batch_size mini_batch_size '
                               'minibatch_size',
    'train.epochs': 'ppo_epochs num_iterations max_epochs num_ppo_epochs mu '
                    'update_epochs',
    'train.microbatch_tokens': 'micro_batch_size ppo_micro_batch_size '
                               'ppo_micro_batch_size_per_gpu '
                               'micro_train_batch_size '
                               'per_device_train_batch_size '
                               'gradient_accumulation_steps '
                               'ppo_max_token_len_per_gpu '
                               'train_micro_batch_size',
    'train.packing': 'use_remove_padding packing_samples use_dynamic_bsz',
    'train.behaviour.weight': 'tis vllm_importance_sampling_correction',
    'train.behaviour.cap': 'tis_imp_ratio_cap '
                           'vllm_importance_sampling_cap',
    'optimizer.learning_rate': 'lr actor_learning_rate actor_lr',
    'optimizer.schedule': 'lr_scheduler_type lr_scheduler warmup_style',
    'optimizer.warmup_steps': 'warmup_steps lr_warmup_steps '
                              'num_warmup_steps',
    'optimizer.schedule_steps': 'lr_decay_steps decay_steps',
    'optimizer.floor': 'min_lr_ratio',
    'optimizer.beta1': 'adam_beta1', 'optimizer.beta2': 'adam_beta2',
    'optimizer.epsilon': 'adam_epsilon eps epsilon',
    'optimizer.weight_decay': 'l2',
    'optimizer.max_grad_norm': 'grad_clip clip_grad max_norm',
    'method.weight': 'importance_sampling_level',
    'method.reg.coef': 'beta',  # of the paper
    'method.reference.coef': 'kl_coef kl_loss_coef init_kl_coef kl_coeff beta '
                             'init_coef',
    'method.reference.estimator': 'kl_loss_type kl_estimator kl_penalty',
    'method.reference.place': 'use_kl_loss use_kl_in_reward use_loss',
    'method.reference.period': 'ref_model_sync_steps sync_ref_model',
    'method.clip.low': 'clip_ratio clip_ratio_low eps_clip eps_clip_low_high '
                       'epsilon cliprange',
    'method.clip.high': 'clip_ratio_high epsilon_high eps_clip_high',
    'method.aggregate': 'loss_agg_mode loss_type',
    'method.estimator': 'adv_estimator advantage_estimator scale_rewards '
                        'norm_adv_by_std_in_grpo',
    'compute.dtype': 'bf16 fp16 precision param_dtype torch_dtype',
    'compute.remat': 'gradient_checkpointing enable_gradient_checkpointing',
    'compute.attention': 'attn_implementation flash_attn',
    'lora.rank': 'lora_rank lora_r r', 'lora.alpha': 'lora_alpha',
    'lora.targets': 'target_modules lora_target_modules',
    'mesh.fsdp': 'fsdp_size zero_stage',
    'mesh.tensor': 'tensor_model_parallel_size tensor_parallel_size tp',
    'eval.sets': 'val_files eval_dataset test_files val_data',
    'eval.period': 'test_freq eval_steps eval_every eval_interval val_freq '
                   'eval_every_n_steps',
    'eval.before': 'val_before_train eval_on_start',
    'eval.samples': 'val_n eval.n val_kwargs.n val.n'
                    ' eval_n_samples_per_prompt',
    'checkpoint.period': 'save_freq save_steps save_every save_interval',
    'checkpoint.keep': 'max_actor_ckpt_to_keep save_total_limit max_ckpt_num '
                       'max_to_keep',
    'wandb_project': 'project_name report_to use_wandb',
    'profile.steps': 'profile_steps',
}
# Why there is no field -> names, and sections, of what is not here.
ABSENT = {
    'the warm-up is a number of rollout steps, optimizer.warmup_steps':
        'lr_warmup_steps_ratio lr_warmup_ratio warmup_ratio',
    'there is no critic':
        'gamma lam lambd vf_coef critic critic_warmup cliprange_value',
    'an entropy bonus of C is method.reg.penalty=entropy, method.reg.region='
    'all and method.reg.coef=-C, in the place of the row\'s own regulariser':
        'entropy_coeff entropy_coef entropy_loss_coef',
    'the reference policy is the one that a run starts from':
        'ref ref_model',
    'training samples without truncation; eval.top_p and eval.top_k are of '
    'evaluation': 'rollout.top_p rollout.top_k train.top_p train.top_k'}


def means(name: str, known: Collection[str]) -> list[str]:
  """The fields among `known` that `name`, which is none of them, means
  elsewhere: by its longest end in NAMES, so that actor.optim.lr is lr."""
  found = {}
  for field in known:
    for other in NAMES.get(field, '').split():
      if _ends(name, other):
        found.setdefault(len(other), []).append(field)
  return found[max(found)] if found else []


def absence(name: str) -> str | None:
  """Why there is no field of this name."""
  return next((why for why, names in ABSENT.items() for other in names.split()
               if _ends(name, other) or other in name.split('.')), None)


def _ends(name, other):
  return f'.{name.lower()}'.endswith(f'.{other}')
