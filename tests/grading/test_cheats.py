r"""What a policy could learn to write in place of an answer.

Answers with two readings, of which either could be right; words that hide a
second value; formulas of the problem, copied. Each was right once.
"""

import pathlib

import pytest

from tepo_jax import grading
from tepo_jax.data import datasets
from tepo_jax.grading import answers
from tepo_jax.grading import copies
from tepo_jax.grading import grader
from tepo_jax.grading import structures
from tests.data import benchmarks

_SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'benchmarks'

_ROOTS = r'\sqrt{35}/1\sqrt{\frac{5}{7}}'  # 5, or 7 if the last root is below
_LOGARITHM = r'5+2\cdot\frac{\ln 10-\log 10}{\ln 10-1}'  # 5, or 7 if to base 10


def _grade(answer, reference, problem=None):
  return grading.grade(f'\\boxed{{{answer}}}', [
      grading.Reference(reference, problem=problem)])


@pytest.mark.parametrize('answer, right, wrong', [
    (_ROOTS, '5', '7'), (f'x={_ROOTS}', '5', '7'),
    (f'({_ROOTS},3)', '(5,3)', '(7,3)'),
    (f'\\{{{_ROOTS},3\\}}', r'\{5,3\}', r'\{7,3\}'),
    (r'\sqrt{35}x/1\sqrt{\frac57}', '5x', '7x'), ('x/1 y', 'xy', r'\frac{x}{y}'),
    ('-5i/1(i)', '5', '-5'), (r'12/{1}\sqrt{4}', '24', '6'), ('24/2(2)', '24', '6'),
    (f'{_LOGARITHM}+f(1)-f(1)', '5', '7'), (f'{_LOGARITHM}+a(b)-a(b)', '5', '7'),
    ('1/2x', r'\frac{x}{2}', r'\frac{1}{2x}')])
def test_an_answer_has_one_reading(answer, right, wrong):
  assert _grade(answer, right) and not _grade(answer, wrong)


@pytest.mark.parametrize('reference', [r'\frac{1}{2x}', r'\frac{x}{2}'])
def test_a_reference_has_both_readings(reference):
  assert _grade(reference, '1/2x')


@pytest.mark.parametrize('answer', ['x(y)', 'xy', 'y(x)'])
def test_a_letter_before_brackets_is_a_factor_where_the_reference_has_one(answer):
  assert _grade(answer, 'xy') and not _grade(answer, 'x')
  assert not _grade('x(0)', '0') and not _grade('3(0)', 'I(0)')


@pytest.mark.parametrize('answer', [
    r'5\text{ cm}-7', r'5\text{ perhaps }7', r'5\text{.}7', r'5\text{ times }7',
    r'5\text{ a}/b', r'5\mathrm{x}-7', r'5\mathrm{E}-7',
    r'5\text{ x } | 7\text{ y}', r'5\text{ x }\approx 7\text{ y}',
    r'5\text{ cm}=7\text{ m}', r'5\text{ cm}+\frac{1}{2}', r'5 \approx 7',
    r'x=5\approx 7', r'7 \equiv 5', r'5|_{x=7}', r'5\text{ or $7$}',
    r'the answer is \(7\), not \(5\)'])
def test_words_and_relations_hide_no_second_value(answer):
  assert not _grade(answer, '5')


@pytest.mark.parametrize('answer, reference', [
    (r'5\text{ cm}', '5'), (r'25\text{ cm}^2', '25'), (r'5\text{ km}/\text{h}', '5'),
    (r'5\text{ or }7', '5,7'), (r'25\text{ units}^2', '25'),
    (r'5\ \mathrm{rad}/\mathrm{s}', '5'), (r'5\text{ boxes}/\text{day}', '5'),
    (r'5\ \mathrm{kg}\cdot\mathrm{m}', '5'), (r'5\text{m}^4', '5'),
    (r'\text{Area} = 5', '5'), (r'\text{Area of } \triangle ABC = 5', '5'),
    (r'V_{\text{max}}=5', '5'),
    (r'\text{gcd}(10,15)=5', '5'), (r'2\sqrt{2}\approx 2.83', r'2\sqrt2'),
    (r'x=2\sqrt{2} \approx 2.83', r'2\sqrt2'), (r'\approx 17', '17'),
    (r'\frac{1}{2}\approx 0.5', '0.5'), (r'x\approx 3.14', '3.14'),
    (r'\approx 8.24', r'\approx 8.24\text{ mph}'), ('0', r'P(x)\equiv 0'),
    (r'P(x)\equiv0', r'P(x)\equiv 0'), (r'\(2\) and \(3\)', '2,3'),
    (r'The minimum value of \(f\) is \(\sqrt{2}+1\).', r'\sqrt2+1'),
    ('(1+r)^2P', 'P(1+r)^2'), ('gh+g', 'g(h+1)')])
def test_words_and_names_are_no_fault(answer, reference):
  assert _grade(answer, reference)


@pytest.mark.parametrize('reference, answer', [
    ('x+y+z=0', '0'), (r'0.56=56\%', '0=1'), (r'0.56=56\%', 'x=x'),
    ('3-x', '|x-3|'), ('x+3', r'\sqrt{(x+3)^2}'), ('xy', '|xy|'),
    ('ab', r'\sqrt{a^2b^2}'), (r'\frac{x}{y}', r'\frac{|x|}{|y|}'),
    (r'The smallest integer \( k \) is 2022.', 'k'),
    (r'\(\{n \ge 13\}\)', r'-\(\{n \ge 13\}\)'),
    (r'n-3 \text{ if } n \text{ is odd and } n-2 \text{ otherwise}', 'n-3')])
def test_parts_and_signs_count(reference, answer):
  assert not _grade(answer, reference)


@pytest.mark.parametrize('problem, reference, copy', [
    ('Compute $99^2+99+1$.', '9901', '99^2 + 99 + 1'),
    (r'Find \(\frac{1}{\log_2 6}+\frac{1}{\log_3 6}\).', '1',
     r'\dfrac{1}{\log_2 6}+\frac{1}{\log_3 6}'),
    (r'If $S=\sum_{k=1}^{4} k$, what is $S$?', '10', r'\sum_{k=1}^{4} k'),
    (r'Simplify \[\frac{\sqrt{242}}{\sqrt2}.\]', '11',
     r'\frac{\sqrt{242}}{\sqrt2}'),
    ('What is 12+3-4?', '11', '12+3-4')])
def test_a_formula_of_the_problem_is_no_answer(problem, reference, copy):
  assert _grade(copy, reference), 'it has the right value'
  assert not _grade(copy, reference, problem)
  assert _grade(reference, reference, problem)


@pytest.mark.parametrize('copy', [
    'x=99^2+99+1', '(99^2+99+1)', '{99^2+99+1}', r'99^2+99+1\text{ units}',
    '99^{2}+99+1', '99**2+99+1', '1+99^2+99', '99^2+99+1+0', r'1\cdot(99^2+99+1)',
    '99^2+99+1=99^2+99+1', '9901=99^2+99+1'])
def test_a_copy_in_another_spelling_is_one_too(copy):
  assert _grade(copy, '9901') and not _grade(
      copy, '9901', r'Compute $99^2+99+1$.')
  assert _grade('99^2+100', '9901', r'Compute $99^2+99+1$.')


@pytest.mark.parametrize('problem, reference, answer', [
    ('Is $x=5$ or $x=6$ right, if $x+1=6$?', '5', 'x=5'),
    (r'Which is larger, $2^{10}$ or $3^6$?', '2^{10}', '2^{10}'),
    (r'Which is larger, $2^{10}$ or $3^6$?', '2^{10}', '2^10'),
    (r'It is $\sqrt{20}/2$ or $-1/2$.', r'-\frac12', '-1/2'),
    (r'It is $\sqrt{20}/2$ or $-1/2$.', r'\sqrt5', r'\sqrt{20}/2'),
    (r'He ate $\frac{1}{4}$ of it. What share?', '0.25', r'\frac{1}{4}'),
    ('Factor $x^2-1$.', '(x-1)(x+1)', '(x+1)(x-1)'),
    ('What is $2^{10}-1$?', '1023', '1024-1')])
def test_what_the_problem_names_may_be_the_answer(problem, reference, answer):
  assert _grade(answer, reference, problem)


# Problem, reference, copied text. Each has the value of the reference.
_COPIES = [
    (r'Expand $(x+1)^2$.', 'x^2+2x+1', '(x+1)^2'),
    (r'Factor $x^2-1$.', '(x-1)(x+1)', 'x^2-1'),
    (r'Write $\frac{3}{20}$ as a decimal.', '0.15', r'\frac{3}{20}'),
    (r'Write $3/20$ as a decimal.', '0.15', '3/20'),
    (r'Solve $-2<x-1<3$ for $x$: $-1<x<4$.', '(-1,4)', '-1<x<4'),
    (r'Find \(2\begin{pmatrix}1\\2\end{pmatrix}\).',
     r'\begin{pmatrix}2\\4\end{pmatrix}', r'2\begin{pmatrix}1\\2\end{pmatrix}'),
    (r'Write $y-2x=3$ in slope-intercept form.', 'y=2x+3', 'y-2x=3'),
    (r'Compute the vector $(1+1,2+2)$.', '(2,4)', '(1+1,2+2)'),
    (r'If $3x+4y=10$, find $3x+4y$.', '10', '3x+4y=10'),
    (r'Write $1$ as a sum of unit fractions.',
     r'\frac12+\frac13+\frac16', '1'),
    (r'Decompose $\frac{1}{4}$ into unit fractions.',
     r'\frac18+\frac{1}{12}+\frac{1}{24}', r'\frac14'),
    ('Express $40$ as a product of powers of primes.', r'2^3\cdot5', '40'),
    *((r'Write $3.\overline{7}$ as a fraction.', r'\frac{34}{9}', copy)
      for copy in (r'3.\overline{7}', r'x=3.\overline{7}', r'3.\bar{7}',
                   r'\left(3.\overline{7}\right)', r'3.\overline{77}')),
    (r'Compute $0.18\div0.003.$', '60', r'0.18\div0.003.'),
    (r'What is $(-64)\div(-32)$?', '2', r'(-64)\div (-32)'),
    (r'What is $\frac{60}{12}$?', '5', r'\frac{60}{12}'),
    (r'Simplify $\frac{x^2-1}{x-1}$.', 'x+1',
     r'\frac{x^2-1}{x-1}=\frac{x^2-1}{x-1}'),
    (r'Compute $\binom{10}{3}$.', '120', r'{10 \choose 3}'),
    (r'Find $\frac{3}{\frac{6}{11}}$.', r'\frac{11}{2}', r'\frac{3}{\frac{6}{11}}'),
    (r'Let $A = {10 \choose 2}$ and $x=2A$. Find $x/2$.', '45', r'{10 \choose 2}'),
    (r'Find all values of $f(10)$.', r'All \(f(10)\) are even numbers.', 'f(10)')]


@pytest.mark.parametrize('problem, reference, copy', _COPIES)
def test_a_copy_is_no_answer_whatever_the_kind(problem, reference, copy):
  if copy != '3x+4y=10':  # which is no answer of 10 in any case
    assert _grade(copy, reference, None)
  assert not _grade(copy, reference, problem)
  assert _grade(reference, reference, problem)


@pytest.mark.parametrize('problem, reference, operation', [
    ('What is the remainder when $10^{2021}$ is divided by $10101$?', '9091',
     r'10^{2021} \bmod 10101'),
    ('Find the last digit of $7^{2022}$.', '9', r'7^{2022} \mod 10'),
    ('Find the greatest common divisor of 2024 and 748.', '44',
     r'1+\gcd(2024,748)-1'),
    ('Which pair?', '(4,12)', r'(4,\operatorname{lcm}(4,6))'),
    ('How many at most?', '3', r'\max(2,3)')])
def test_an_operation_of_the_problem_is_no_answer(problem, reference, operation):
  assert _grade(operation, reference)
  assert not _grade(operation, reference, problem)
  assert _grade(operation, operation, problem)
  assert _grade(r'\gcd(24,18)=6', '6', problem)
  for residue in r'3\bmod 7', r'3\mod 7', '3 mod 7', r'x=3\bmod{7}':
    assert _grade(residue, '3', problem) and _grade(residue, r'3\pmod 7', problem)
  assert _grade(r'\max(a,b)', r'\frac{a+b+|a-b|}{2}', problem)


@pytest.mark.parametrize('problem, reference, answer', [
    (r'Is $(x+1)^2$ or $x^2+1$ larger at 1?', 'x^2+2x+1', '(x+1)^2'),
    (r'Which of $\frac12$ and $0.4$ is larger? Answer as a decimal.', '0.5',
     r'\frac12'),
    (r'A coin shows heads with probability $\frac12$. What is it for two?',
     '0.5', r'\frac12'),
    (r'Expand $(x+1)^2$.', 'x^2+2x+1', '(x+1)(x+1)'),
    (r'Expand $(x+1)^2$.', 'x^2+2x+1', '(x+1)(x+1)=x^2+2x+1'),
    (r'Find $3x+4y$.', '10', '3x+4y=10'),
    (r'Write $13_{10}$ in base 12.', '11', '11_{12}'),
    (r'$142$ of them in simplest form.', '142.0', '142'),
    (r'Write $3.\overline{7}$ as a fraction.', r'\frac{34}{9}',
     r'3.\overline{7}=\frac{34}{9}'),
    ('Of 120 people in a room, 5 sit down in a row. In how many ways?', '5!', '120'),
    (r'How many subsets do $5$ of $32$ balls have?', '2^{5}', '32'),
    (r'Of 20 people, 6 are asked. How many groups of 3?', r'\binom{6}{3}', '20')])
def test_what_is_no_copy(problem, reference, answer):
  assert _grade(answer, reference, problem)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.skipif(not _SHARED.is_dir(), reason='no real copies here')
def test_copies_of_the_local_data():
  """Copies every formula of each fifth problem; prints what stays right."""
  total = touched = 0
  left = []
  for file, name in benchmarks.FILES.items():
    for problem in datasets.load(f'{name}:{_SHARED / file}.jsonl')[::5]:
      for reference in problem.references:
        total += 1
        verdicts = {
            text: [grader.decide_quickly(text, (given,))[0] for given in (
                reference._replace(problem=None), reference)]
            for text in copies._formulas(problem.problem)[0] if text}
        touched += [True, False] in verdicts.values()
        left += [(problem.problem, reference.text, text)
                 for text, found in verdicts.items() if found[1]
                 and structures.try_read(text) and copies._form(
                     structures.try_read(text)) != copies._form(
                         structures.try_read(answers.canonical(reference.text)))]
  print(f'\n{touched} of {total} references have a copy that counted')
  print(*left, sep='\n')
  assert touched > 20
  assert all(copies._is_choice(problem) or copies._is_number(copies._form(
      structures.try_read(text))) for problem, _, text in left)
