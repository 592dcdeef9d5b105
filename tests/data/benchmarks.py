"""Local copies of the benchmarks: name of the file -> name of the set."""

FILES = {
    'dapo_math_17k': 'dapo_math', 'gsm8k_test': 'gsm8k', 'math500': 'math500',
    'aime24': 'aime24', 'aime25': 'aime25', 'amc83': 'amc',
    'omni_math_rule': 'omni_math', 'minerva_math': 'minerva',
    'olympiadbench': 'olympiadbench'}
