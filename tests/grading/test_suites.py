r"""Verdicts of the public suites that other graders are tested with.

`suites.jsonl` holds their facts (reference, answer, verdict), each case that
gives one answer to one reference, taken from the tests of

  math-verify  huggingface/Math-Verify 5d148cf      Apache-2.0
  hendrycks    hendrycks/math 985bdc1               MIT
  mario        MARIO-Math-Reasoning/MARIO_EVAL 13584f2  MIT
  nemo-skills  NVIDIA-NeMo/Skills 0b012df           Apache-2.0

Where the verdicts differ, DIFFERENT names the convention of the README by
which they do.
"""

import json
import pathlib

from tepo_jax import grading

_FACTS = pathlib.Path(__file__).with_name('suites.jsonl')
# {convention: [(reference, answer)]}
DIFFERENT = {
    'a comma is no decimal point': [
        ('1000.99', '1000,99'), ('1,22', '1.22'), ('0,111', '0.111')],
    'rounding': [
        ('x = 1/3', r'x = 5+5+1 = 1/3 \approx 11'), ('1/3', r'x=1/3\approx1.3'),
        (r'(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})',
         r'\begin{pmatrix}0.33\\0.2 \end{pmatrix}'),
        (r'(\frac{3}{5},\frac{8}{3}]', '(0.6,2.6667]'),
        (r'x + \sqrt2I', 'x + 1.414I'), (r'40\pi', '125.663'),
        (r'\frac13, \sqrt3, \pi', '1/3, 1.732, 3.1416'),
        (r'\begin{cases} a+b=\frac12 \\ a-b=\sqrt3 \end{cases}',
         r'\begin{cases} a+b=0.5\\ a-b=1.732\end{cases}')],
    'the sides of an equation are equal': [
        ('x = 11', 'x = 5+5+1 = 7 =11'), ('z = 1 + 1 = 2', 'z = 3+3 = 2')],
    'brackets count': [
        ('(1,3)', '{1,3}'),
        (r'\begin{matrix} \frac12 \\ 1 \end{matrix}', '[0.5, 1]')],
    'bare lists have no order and no member twice': [
        ('10, 4, -2', '4, 10, -2'), ('0.1, 4, 2', '4, .1, 2'),
        ('(37,3,3,13),(17,3,3,7),(3,37,3,13),(3,17,3,7),(3,3,2,3)',
         '(3, 37, 3, 13), (3, 17, 3, 7), (3, 3, 2, 3), (3,17,3,7), (17,3,3,7), '
         '(37,3,3,13)')],
    'an error of the suite, or of its LaTeX': [
        (r'1 - \frac{1}{\mathrm{e}}', r'1 + \frac{1}{\mathrm{e}}'),
        (r'\\boxed{W(n) = 1 \\text{ and } W(n) = -1', 'W(x)=1orW(x)=-1'),
        (r'\\begin{matrix} x \\\\ \\sqrt{3} + 2I  \\\\ \\frac12 \\end{matrix}',
         r'\begin{matrix} x \\ \sqrt{3} + 2I \\ 0.5 \end{matrix}')],
}


def test_each_disagreement_has_its_convention():
  facts = [json.loads(line) for line in _FACTS.read_text().splitlines()]
  differing = {
      (fact['reference'], fact['answer']) for fact in facts
      if grading.grade(f'\\boxed{{{fact["answer"]}}}', [fact['reference']]) != (
          fact['verdict'])}
  assert len(facts) == 277
  assert differing == {pair for pairs in DIFFERENT.values() for pair in pairs}
