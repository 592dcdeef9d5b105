r"""Extracts final answers and normalises their spelling."""

import decimal
import time

import pytest

from tepo_jax.grading import answers


@pytest.mark.parametrize('completion, answer', [
    (r'so \boxed{34}', '34'),
    (r'first \boxed{1}, then \boxed{2}.', '2'),
    (r'\boxed{\frac{1}{2}} and \boxed{unfinished', r'\frac{1}{2}'),
    (r'\boxed{1} \boxed{2 \boxed{3', '1'),
    (r'\boxed{a \boxed{b} c}', 'b'),
    (r'\fbox{7}', '7'),
    (r'\boxed{7} \fbox{8}', '8'),
    (r'\boxed {5}', '5'),
    (r'\boxed{ 5 }', '5'),
    (r'\boxed{\{1,2\}}', r'\{1,2\}'),
    (r'\boxed{\left\{ x \right.}', r'\left\{ x \right.'),
    (r'} { \boxed{5} }', '5'),
    (r'\\boxed{5}', '5'),
    (r'\\\boxed{5}', '5'),
    ('\\boxed{a\nb}', 'a\nb'),
    (r'So $\boxed 2$.', '2'),
    (r'\fbox-1,234.5.', '-1,234.5'),
    (r'\boxed1 or \boxed 2', '2'),
    (r'Fill in \boxed{}: \boxed 2', '2'),
    (r'$\boxed\frac{1}{2}$', r'\frac{1}{2}'),
    (r'\boxed x', 'x'),
    (r'\boxed{5}. I used \boxed I think', '5'),
    (r'\boxed{5}. I put it in \boxed, or a \boxed answer, \boxed\text{a{b}}.',
     '5'),
    (r'\boxed \boxed{5 + {6}}', '5 + {6}'),
    (r'\boxed{5}. I put it within \boxed{}.', '5'),
    (r'\boxed{}', None),
    (r'\boxed{', None),
    (r'\boxed', None),
    ('34', None),
    ('', None),
    ('\\boxed{1} \\boxed{' + '1' * 2001 + '}', None),
    ('\\boxed{' + '1' * 2000 + '}', '1' * 2000),
])
def test_extract_box(completion, answer):
  assert answers.extract(completion, 'boxed') == answer


@pytest.mark.parametrize('completion, answer', [
    ('Answer: 34', '34'),
    ('Answer: 1\nno\nanswer : 2\nbye', '2'),
    ('**Answer:** $\\frac12$', '$\\frac12$'),
    ('**Answer: 34**', '34'),
    ('**Answer**: 34', '34'),
    ('**Answer:**\n34', '34'),
    ('Answer：34', '34'),
    ('Answer: \\boxed{34}.', '34'),
    ('Answer: \\boxed{34', '\\boxed{34'),
    ('The answer is 34', None),
    ('\\boxed{34}', None),
    ('Answer:', None),
    ('Answer: ' + '1' * 2001, None),
])
def test_extract_answer_line(completion, answer):
  assert answers.extract(completion, 'answer') == answer


def test_extraction_is_linear():
  start = time.perf_counter()
  for text in ('\\boxed{' * 15_000, '\\' * 100_000 + '\\boxed{', '{' * 100_000,
               '\\boxed{' + '{}' * 50_000, '\\boxed' + ' ' * 100_000,
               '\\boxed\\a' * 15_000, '\\boxed\\a{' * 15_000,
               'Answer' + ' ' * 100_000, 'Answer: ' * 12_000,
               'Answer:' + '*\n' * 50_000):
    answers.extract(text, 'boxed')
    answers.extract(text, 'answer')
  assert time.perf_counter() - start < 5


def test_unknown_style():
  with pytest.raises(ValueError, match="unknown answer style 'box'"):
    answers.extract('', 'box')


@pytest.mark.parametrize('text, spelling', [
    (r'$\left( 3, 4 \right)$.', '(3,4)'), (r'\text{ east }', r'\text{east}'),
    (r'\[ \dfrac{1}{2} \]', r'\frac{1}{2}'), ('90^\\circ', r'90\text{degree}'),
    (r'90^{\circ}+1', '90+1'), (r'10{,}080', '10,080'), (r'1\,000', '1000'),
    (r'\$5', '5'), ('x ≤ 3', r'x\le 3'), (r'x \leqslant 3', r'x\le 3'),
    ('\ufeff2\u200b', '2'), ('\u200e1\xad0\u202c', '10'),
    (r'a \quad b', 'a b'), (r'\mathbf{7}', '7'), ('−½', r'-\frac12'),
    (r'0.1\overline{6}', r'\frac{15}{90}'), (r"y^{\prime}", "y'"),
    (r'\sin 30^\circ', r'\sin 30\frac{\pi}{180}'),
    (r'\\frac{5}{9}', r'\frac{5}{9}'),
    (r'\begin{matrix}a\\b\end{matrix}', r'\begin{matrix}a\\b\end{matrix}'),
    ('', ''), ('.', ''), ('$', '')])
def test_canonical(text, spelling):
  assert answers.canonical(text) == spelling


@pytest.mark.parametrize('text, number', [
    ('1,234', '1234'), ('-0.5', '-0.5'), ('.5', '0.5'), ('8.7e8', '8.7e8'),
    (r'8.7\times 10^8', '8.7e8'), (r'8.7\cdot 10^{-8}', '8.7e-8'), ('+3', '3'),
    ('1,23', None), ('1e99999', None), ('3x', None), ('', None)])
def test_number(text, number):
  assert answers.number(text) == (number and decimal.Decimal(number))
