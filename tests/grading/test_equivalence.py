r"""Equivalent answers and near misses by hand: (reference, answer)."""

import time

import pytest

from tepo_jax import grading
from tepo_jax.grading import answers
from tepo_jax.grading import grader
from tepo_jax.grading import structures
from tepo_jax.grading import verifying
from tests.grading import grades
from tests.grading import observed

EQUAL = {
    'integers': [
        ('34', '34'), ('073', '73'), ('-5', '-5'), ('1234', '1,234'),
        ('10,080', r'10{,}080'), ('10080', r'10,\!080'), ('142', '142.0'),
        ('5', '+5'), ('7.', '7'), ('0', '-0'), ('1000000', '1{,}000{,}000'),
        ('5', '$5$'), ('5', r'\(5\)'), ('5', r'\[ 5 \]'), ('5', '(5)'),
        ('5', '{5}'), ('5', r'\{5\}'), ('5', r'\text{5}'), ('5', r'\mathbf{5}'),
        ('-5', '−5'), ('5', '5.'), (r'\boxed{5}', '5'), ('720', '6!'),
        ('1024', '2^{10}'), ('1024', '2^10'), ('8', '2**3'),
        ('12345678901234567890123456789012',
         '12345678901234567890123456789012')],
    'decimals': [
        ('0.5', '.50'), ('8.7e8', r'8.7\times 10^8'), ('1e-3', '0.001'),
        ('8.7e8', r'8.7 \times 10^{8}'), ('8.7e8', r'8.7 \cdot 10^{8}'),
        ('8.7e8', '8.7*10^8'), ('8.7e8', '870000000'), ('1.5e-4', '0.00015'),
        ('0.333333', '0.3333333'), ('-1./3', r'-\frac13'), ('0.5', r'\frac12'),
        ('1/2', '0.5'), ('0.333', '1/3'), ('1/3', '0.3333333333'),
        (r'\frac16', r'0.1\overline{6}'), (r'\frac13', r'0.\bar{3}'),
        ('2.718281828', 'e'), ('3.1415926', r'\pi')],
    'fractions': [
        (r'\frac{1}{2}', r'\dfrac{1}{2}'), (r'\frac12', '1/2'),
        (r'\frac12', r'\tfrac{2}{4}'), (r'\frac{7}{4}', r'\frac74'),
        (r'-\frac{1}{2}', r'\frac{-1}{2}'), (r'-\frac{1}{2}', r'\frac{1}{-2}'),
        (r'\frac83', '2 2/3'), (r'2\frac{2}{3}', r'\frac{8}{3}'),
        (r'137 \frac{1}{2}', '137.5'), (r'\frac{1}{72}', r'\frac1{72}'),
        (r'\frac{3}{56}', '3 / 56'), ('2', r'\frac{10}{5}'),
        (r'\frac{1}{2}+\frac{1}{3}', r'\frac56')],
    'closed forms': [
        (r'\frac{3\sqrt{2}}{2}', r'\frac{3}{\sqrt2}'), ('e^{16}', 'exp(16)'),
        (r'\frac{\pi}{2}', 'pi/2'), ('exp(16)', 'e^{16}'),
        (r'\frac{\pi}{2}', 'π/2'), (r'\frac\pi2', r'0.5\pi'),
        ('np.arcsin(10/13)', r'\arcsin(10/13)'),
        ('np.arcsin(10/13)', r'\sin^{-1}\left(\frac{10}{13}\right)'),
        (r'2\sqrt{3}', '2*sqrt(3)'), (r'2\sqrt{3}', r'\sqrt{12}'),
        (r'2\sqrt{3}', '2√3'), (r'\sqrt[3]{16}', r'2\sqrt[3]{2}'),
        (r'\sqrt[3]{2}', '2^{1/3}'), (r'\sqrt[3]{-8}', '-2'),
        ('0', r'\sqrt{3+2\sqrt2}-\sqrt2-1'), ('1', r'\sqrt{3+2\sqrt2}-\sqrt2'),
        ('1', r'\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}'),
        ('0', r'\pi^{999}-\pi^{500}\pi^{499}'), (r'\sqrt{6+2\sqrt5}', r'1+\sqrt5'),
        (r'\frac{1+\sqrt5}{2}', r'\frac{2}{\sqrt5-1}'),
        (r'\ln 4', r'2\ln 2'), (r'\log_2 8', '3'), (r'\ln\frac12', r'-\ln 2'),
        (r'\sin 30^\circ', r'\frac12'),
        (r'\cos\frac{\pi}{4}', r'\frac{\sqrt2}2'),
        ('6-5i', '-5i+6'), (r'-2+2\sqrt{3}i', r'2i\sqrt3-2'),
        ('e^{i\\pi}', '-1'), (r'\binom{10}{3}', '120'),
        (r'\frac{100!}{98!}', '9900'), ('2012^{2012}', r'2012\cdot2012^{2011}'),
        (r'\frac{1}{2^{99}}', r'2^{-99}'), (r'8\pi', r'8 \cdot \pi'),
        (r'\left\lfloor 7/2 \right\rfloor', '3'), (r'|-3|', '3')],
    'variables': [
        ('x + 1', 'x+1'), ('x^2+2x+1', '(x+1)^2'), ('n(n+1)/2',
         r'\frac{n^2+n}{2}'), (r'\binom{n}{2}', r'\frac{n(n-1)}{2}'),
        (r'2^{n-1}(2^{n-1} + 1)', '4^{n-1}+2^{n-1}'), ('2^{n+1}', r'2\cdot2^n'),
        (r'\frac{1}{2n+2}', r'\frac{1}{2(n+1)}'), ('(a+5)(b+2)', 'ab+2a+5b+10'),
        (r'\frac{e^{t}}{3}+c e^{-2 t}', 'e^t/3+ce^{-2t}'),
        (r'-\tau \ln \Delta', r'\tau\ln\frac1\Delta'),
        (r'\cot x', r'\frac{\cos x}{\sin x}'), ('x_0', 'x_{0}'),
        (r'\sin^2 x', r'1-\cos^2 x'), (r'I(0)e^{-t/\tau}', r'e^{-t/\tau}I(0)'),
        (r'\sqrt{4 \pi G \rho_{0} r_{0}^{2}}', r'\sqrt{4\pi r_0^2\rho_0 G}'),
        ('(2n)!', '(2n)(2n-1)!'), ('n 2^{n-2}', r'\frac{n2^n}{4}'),
        (r'\left\lceil \frac{n}{2} \right\rceil', r'\lceil n/2 \rceil')],
    'names and equations': [
        ('5', 'x=5'), ('x=5', '5'), ('x=5', 'x = 5'), ('n(n+1)', 'f(n)=n^2+n'),
        ('f(x)=2x', 'f(x) = x+x'), ('y=2x+3', '2x+3'), ('2x+3', 'y=2x+3'),
        ('y=2x+3', 'y-2x=3'), ('y = 2x + 3', '2x-y+3=0'),
        ('5x - 7y + 11z + 4 = 0', '-5x+7y-11z=4'), (r'x=\frac64', r'\frac32'),
        ('x^2+y^2=4', r'\frac{x^2}{4}+\frac{y^2}{4}=1'),
        ('MR=SRMC', 'MR = SRMC'), ('12', 'area: 12'),
        ('3:5', r'\frac35'), ('3:5', '6:10')],
    'pairs and vectors': [
        (r'\left( 3, 4 \right)', '(3,4)'), ('(3,4)', '3,4'),
        ('(1,2)', r'\left(1,2.0\right)'),
        (r'(3,\frac{\pi}{2})', r'\left(3,\tfrac\pi2\right)'),
        ('(1,2)', 'x=1, y=2'), ('(1,2)', '(x,y)=(1,2)'),
        ('(1,2)', r'\langle 1,2 \rangle'),
        (r'\begin{pmatrix}1\\2\end{pmatrix}',
         r'\begin{bmatrix}1\\2\end{bmatrix}'),
        (r'\begin{pmatrix}1\\2\end{pmatrix}', '(1,2)'),
        (r'\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}',
         r'\begin{pmatrix}-\frac13\\\frac23\end{pmatrix}'),
        (r'\begin{pmatrix}1&2\\3&4\end{pmatrix}',
         r'\left[\begin{array}{cc}1&2\\3&4\end{array}\right]')],
    'sets and lists': [
        (r'\{1,2\}', r'\{2,1\}'), ('1,2', '2,1'), ('1,2', r'\{1,2\}'),
        ('$69$,$84$', '69,84'), ('1,-2', '-2 and 1'),
        ('1,-2', r'1\text{ or }-2'),
        ('1,-2', 'x=1 or x=-2'), (r'1\pm\sqrt5', r'1-\sqrt5,1+\sqrt5'),
        (r'\{1\pm\sqrt{5},-2\}', r'\{-2,1+\sqrt5,1-\sqrt5\}'),
        (r'\pm \frac94', r'-\frac94, \frac94'), ('100, 200', '200, 100'),
        ('(2,32), (8,18)', '(8,18), (2,32)'), ('1;2', '2,1'),
        ('$f(x)=-1$,$f(x)=x+1$', 'x+1, -1'), (r'\emptyset', '∅')],
    'intervals': [
        ('-2<x<7', '(-2,7)'), ('(-2,7)', '-2<x<7'), ('[-2,7]', r'-2\le x\le7'),
        (r'x \in [-2,7]', '[-2,7]'), ('(-2,7]', r'-2<x\leqslant 7'),
        (r'(2,\infty)', 'x>2'), (r'(-\infty, 0]', r'x\le 0'), ('x>2', '2<x'),
        ('0<x<1', '1>x>0'), (r'(2,\infty)', r'(2,+\infty)'),
        (r'(-\infty, 2) \cup (3, \infty)', 'x<2 or x>3'),
        (r'(-\infty, 2) \cup (3, \infty)', r'(3,\infty)\cup(-\infty,2)'),
        (r'(-\sqrt{3}, \sqrt{3})', r'-\sqrt3<x<\sqrt3'),
        (r'$k \geqslant 2$', r'k\ge2'),
        (r'0 \leq r \leq \frac12', r'r\in[0,0.5]')],
    'units, percents, degrees': [
        ('5', r'5\text{ cm}'), (r'5.4 \text{ cents}', '5.4'),
        ('90', r'90^\circ'),
        (r'90^\circ', '90'), ('90', '90°'), (r'90^\circ', r'90\text{ degrees}'),
        (r'1620 \mathrm{~mm}^{2}', '1620'), ('0.5', r'50\%'), ('9', '9%'),
        (r'1620 \mathrm{~mm}^{2}', r'1620\text{ mm}^2'), ('9', r'9\%'),
        (r'9\%', '9'), (r'9\%', '0.09'), (r'\$18.90', '18.9'),
        ('18.9', r'\$18.90'),
        (r'\$32,\!348', '32348'), (r'89 \mathrm{~km} / \mathrm{h}', '89'),
        (r'5 \text{ m}', r'500\text{ cm}'), ('12', '12 square units'),
        ('12', r'12\text{ square inches}'),
        ('45 minutes', r'\frac34\text{ hour}'),
        (r'\frac{37}{4} m', r'9.25\text{ m}'), (r'\frac{37}{4} m', '9.25')],
    'words and letters': [
        ('Evelyn', r'\text{Evelyn}'), (r'\text{east}', 'East'),
        ('(C)', r'\text{C}'),
        (r'\text{(C)}', 'C'), ('C', '(C)'), (r'\text{even}', r'\textbf{even}'),
        ('x', r'\mathrm{x}')],
    'bases': [
        ('52_8', '52_{8}'), ('52_8', '52'), ('2516_8',
         r'2516_{\text{eight}}'), ('4343_6', '4343_{six}')],
}
# All are 0, with much rounding error.
_CANCELLED = (r'\pi^{999}-\pi^{500}\pi^{499}',
              *(rf'\pi10^{{{size}}}-\sqrt3^2\pi10^{{{size}}}/3'
                for size in (40, 100, 300, 2900, 9900)))
DIFFERENT = {
    'rounding error that shrinks with more digits': [
        (reference, answer) for answer in _CANCELLED
        for reference in ('72', '-31', r'\frac{2}{3}', '0.25', 'x^2+1',
                          r'\sqrt2')],
    'integers': [
        ('34', '35'), ('34', '-34'), ('12', '1.2'), ('12', '1 2'), ('0', '1'),
        ('9007199254740993', '9007199254740992'), ('100000000', '100000001'),
        ('12345678901234567890123456789012',
         '12345678901234567890123456789013'),
        ('2012^{2012}', '2012^{2012}+1'), ('720', '5!'), ('1234', '1.234'),
        ('5', 'not 5'), ('5', '__import__("os").getpid()'), ('5', '55'),
        ('5', '5,5'), ('5', r'\{5,6\}'), ('5', '(5,6)'), ('34', '3 4')],
    'decimals': [
        ('0.5', '0.51'), ('2.88e-19', '1.325e-27'), ('1e9999', '5'),
        ('1e-9999', '0'), ('1/3', '0.333'), ('1/3', '0.34'), ('0.3', '1/3'),
        ('8.7e8', '8.7e9'), ('8.7e8', r'8.7\times10^{-8}'), ('0.333', '0.334'),
        ('0.125', r'\frac17'), (r'\pi', '3.14'), (r'\sqrt2', '1.414'),
        ('0.5', '5'), ('4.5e33', r'4.49\times 10^{33}')],
    'fractions': [
        ('1/2', '2'), (r'\frac{1}{2}', r'\frac{1}{}'), ('22/3', '2 2/3'),
        (r'\frac12', r'-\frac12'), (r'\frac{14}{3}', r'\frac{14}{5}'),
        (r'2\frac23', r'\frac43'), ('1/2^{99}', '1/2^{98}'),
        ('1/2004!', '1/2006!'), (r'\frac{1}{2^{99}}', '0'),
        (r'\frac{1}{10^{30}}', r'\frac{1}{10^{31}}')],
    'closed forms': [
        (r'\sqrt2', r'\sqrt3'), (r'2\sqrt3', r'3\sqrt2'),
        (r'2\sqrt3', r'\sqrt6'),
        (r'8\pi', '8'), ('6-5i', '6+5i'), ('i', '-i'), ('e^{16}', 'e^{-16}'),
        (r'\ln 2', r'\log_2 e'), ('e^{-200}', 'e^{-300}'), ('e^{-200}', '0'),
        (r'\sqrt[3]{2}', r'\sqrt2'), (r'\binom{10}{3}', r'\binom{10}{4}'),
        (r'\frac{1}{2004!}+\sqrt2', r'\sqrt3'), (r'\sqrt{10^{18}+1}', '10^9'),
        (r'e^{\pi\sqrt{163}}', '262537412640768744'), (r'\frac\pi6', '30')],
    'variables': [
        ('x', 'y'), ('x+1', ')('), ('x+1', 'x-1'), ('2x', 'x^2'), ('|x|', 'x'),
        (r'\sqrt{1-\frac{2r}{R}}', r'\sqrt{1-\frac{2R}{r}}'), ('abc', 'abd'),
        (r'\frac{n+1}{2}', r'\frac{n}{2}+1'), ('n!', 'n^2'), ('x_1', 'x_2'),
        (r'\frac{n+1}{4n-2}', r'\frac{n+1}{4n+2}'), ('2^{n-1}', '2^n-1'),
        (r'\sin 2x', r'2\sin x'), (r'I(0) e^{-t}', 'I(0)'), ('c', 'C'),
        (r'\lfloor n/2 \rfloor', r'\lceil n/2 \rceil'), ('f(n)', 'g(n)')],
    'equations': [
        ('y=2x+3', 'y=3x+2'), ('x=5', 'y=5'), ('y=2x+3', 'y=2x-3'),
        ('MR=SRMC', 'SRAC=LRAC'), ('x=5', '6'), ('x^2+y^2=4', 'x^2+y^2=2'),
        ('x=5', 'x=6'), ('3:5', '5:3')],
    'pairs and vectors': [
        ('(1,2)', '(2,1)'), ('(1,2)', r'\{1,2\}'), (r'\{1,2\}', '(1,2)'),
        ('(1,2)', '(1,2,3)'), ('(1,2)', '2,1'), ('(1,2)', '1'), ('(1,2)', '3'),
        ('(1,2)', '[1,2]'), ('(6,31,-1)', '(6,31,1)'),
        (r'\begin{pmatrix}1\\2\end{pmatrix}',
         r'\begin{pmatrix}2\\1\end{pmatrix}'),
        (r'\begin{pmatrix}1&2\\3&4\end{pmatrix}',
         r'\begin{pmatrix}1&3\\2&4\end{pmatrix}')],
    'sets and lists': [
        (r'\{1,2\}', r'\{1,3\}'), ('1,2', '1'), ('1,2', '1,2,3'), ('1', '1,2'),
        (r'\pm 2', '2'), ('2', r'\pm 2'), (r'1,2,\ldots,n', r'1,2,\ldots,m'),
        (r'1,2,\ldots,n', '1,2,3,n'), ('1,1', '1,2'),
        ('(1,2),(3,4)', '(1,2),(4,3)')],
    'intervals': [
        ('[-2,7]', '(-2,7)'), ('(-2,7)', '[-2,7]'), ('(-2,7]', '[-2,7)'),
        ('[-2,7]', '-2<x<7'), ('-2<x<7', '[-2,7]'), ('-2<x<7', r'-2<x\le7'),
        (r'(2,\infty)', 'x<2'), (r'(2,\infty)', r'x\ge2'), ('x>2', 'x>3'),
        (r'(-\infty, 2) \cup (3, \infty)', '(2,3)'), ('x>2', 'y>2'),
        (r'(-\infty, 2) \cup (3, \infty)', '2<x<3'),
        (r't<\frac12', r't>\frac12'),
        (r'(0,1)\cup(2,3)', r'(0,1)\cup[2,3]')],
    'units, percents': [
        (r'5\text{ cm}', r'5\text{ mm}'), (r'5\text{ m}', r'5\text{ s}'),
        ('9%', '90'),
        ('0.09', '9'), (r'9\%', '0.9'), ('45 minutes', '45 hours'),
        ('90', r'9^\circ')],
    'words and letters': [
        ('Evelyn', 'Carla'), (r'\text{east}', 'seat'), ('(C)', '(B)'),
        ('C', 'D'),
        (r'\text{even}', r'\text{odd}')],
    'bases': [
        ('52', '52_8'), ('52_8', '52_9'), ('52_8', '53_8'), ('52_8', '42'),
        ('2516_8', '2516_{7}'),
        ('101_2', '5_{10}')],
}


def _pairs(table):
  return [pair for pairs in table.values() for pair in pairs]


@pytest.mark.parametrize('kind', EQUAL)
def test_equal(kind):
  assert not grades.with_verdict(EQUAL[kind], False)


@pytest.mark.parametrize('kind', DIFFERENT)
def test_different(kind):
  assert not grades.with_verdict(DIFFERENT[kind], True)


def test_what_would_take_long_is_refused():
  """e^{-9999} demands most digits, with which each term takes a second."""
  terms = '+'.join(
      rf'\binom{{{n}+\pi}}{{\pi}}' for n in range(4900, 4886, -1))
  answer = rf'5+e^{{-9999}}+0\cdot({terms})'
  start = time.process_time()
  assert grader.decide_quickly(answer, (grading.Reference('5'),)) == (False, ())
  assert time.process_time() - start < 2


@pytest.mark.parametrize('answer', [
    '2^{2^{100}}', '9^{9^{9^9}}', '1000000!', '9**9**9**9', '((9!)!)!',
    '(' * 60 + '1+2' + ')' * 59 + '^2)', r'\binom{10^9}{10^8}', '2^' * 40 + '2',
    r'\max(9^{9^{9^9}},1)', r'\prod_{k=1}^{1000000} k', '5' + '+5' * 400,
    r'\int_0^1 9^{9^{9^9}} dx', r'\sqrt{' * 60 + '5' + '}' * 60,
    r'\left(' * 45 + '5' + r'\right)^2' * 45, '|' * 60 + '5' + '|' * 60])
def test_what_is_large_is_refused_before_anything_is_computed(answer):
  right, took_s = observed.grade(answer, [grading.Reference('7')])
  assert not right and took_s < 0.2
  assert grading.grade(f'\\boxed{{{answer}}}', [answer])


@pytest.mark.parametrize('reference, answer, right', [
    ('2^{2024}-1', r'It is \(2^{2024}-1\).', True),
    ('2^{2024}-1', r'It is \(2^{2024}-2\).', False),
    ('2023^{2024}', r'It is \(2023\cdot2023^{2023}\).', True),
    ('2023^{2024}x+y=2022^{2024}', r'It is \(2022^{2024}x+y=2023^{2024}\).',
     False),
    # These would take seconds.
    ('5', r'\sum_{k=1}^{9999} \sin(k)', False),
    ('5', r'\sum_{k=1}^{3} k+\sqrt[3]{9999^{2999}-1}', False),
    ('5', r'\sum_{k=1}^{3} k+(9999^{2999}+1)^{1/7}', False)])
def test_powers_are_left_to_math_verify_where_it_is_quick(
    reference, answer, right):
  references = grading.Reference(reference),
  assert grader.decide_quickly(answer, references)[0] is None
  verdict, took_s = observed.grade(answer, references)
  assert verdict is right and took_s < 1


def test_no_verdict_takes_a_second_of_cpu_time():
  """It simplifies this for 13 s. No worker asks again: it had its time."""
  question = r'a=\sum_{i=0}^{k-1}\binom{k-1}{i}\frac{D_{n+9-k-i}}{n-(k+i)}', (
      r'a=\sum_{i=0}^{k-1}\binom{k-1}{i}\frac{D_{n+1-k-i}}{n-(k+i)}',)
  verdict, took_s, _, timed_out = observed.ask(*question)
  assert (verdict, timed_out) == (False, True)
  assert verifying.CPU_S / 2 < took_s < 1
  verdict, _, _, timed_out = observed.ask('1', ('1.0',))
  assert (verdict, timed_out) == (True, False)


@pytest.mark.parametrize('answer', [
    r'5\text{a}' + r'/\text{a}^2' * 150 + '+1', r'5\text{a}' + '/a ' * 600 + '+1',
    r'\choose{' + 1900 * ' ' + '}x', r'\text{a} ' * 200 + 'X'])
def test_no_pattern_can_match_in_exponentially_many_ways(answer):
  verifying.verify('1', ('1.0',), 60)  # imports math-verify
  start = time.process_time()
  grader.decide_quickly(answer, [grader.Reference('5')])
  grader.canonical_key(answer)
  verifying.verify(answer, ('5',), 60)
  assert time.process_time() - start < 2


@pytest.mark.parametrize('answer', [
    ', '.join(rf'x\ne \ln({k}+\pi)' for k in range(50)),
    '(' + r'\cup'.join(f'({k},{k + 1})' for k in range(50)) + r')\setminus\{'
    + ','.join(rf'\ln{k}.5' for k in range(1, 50)) + r'\}'])
def test_many_conditions_are_not_intersected(answer):
  start = time.process_time()
  assert not grading.grade(f'\\boxed{{{answer}}}', ['x>0'])
  assert time.process_time() - start < 0.3


@pytest.mark.parametrize('form', [r'\{%s\}', '%s', r'x=%s'])
@pytest.mark.parametrize('separator', [',', r'\text{ or }'])
def test_items_that_stand_for_many_are_counted(form, separator):
  answer = form % separator.join(
      rf'\pm{k}\pm{7 * k}\pm{91 * k}\pm{1001 * k}' for k in range(1, 49))
  start = time.process_time()
  assert not grading.grade(f'\\boxed{{{answer}}}', [r'\{1,2\}'])
  assert time.process_time() - start < 1


@pytest.mark.parametrize('answer', [
    r'\mathbb R\setminus 0', r'[0,5]\setminus 1', r'\mathbb R\setminus(x>1)',
    r'\mathbb R\setminus\{\text{A}\}', r'2,1\ne[-2,7]'])
def test_what_is_no_set_of_numbers_has_its_spelling_as_key(answer):
  assert grading.canonical_key(answer) == answers.canonical(answer)


def test_no_fault_of_reading_stops_a_vote(monkeypatch):
  monkeypatch.setattr(structures, 'try_read', lambda text: text.kind)
  assert grading.canonical_key('17, a fault') == '17,a fault'


def test_most_are_decided_without_math_verify():
  verdicts = [(pair, grader.decide_quickly(
      pair[1], (grading.Reference(pair[0]),)))
              for pair in _pairs(EQUAL) + _pairs(DIFFERENT)]
  undecided = [pair for pair, (verdict, _) in verdicts if verdict is None]
  assert len(undecided) < 0.06 * len(verdicts), undecided


def test_a_number_is_no_tuple_or_matrix_without_math_verify():
  for several in '(5,6)', r'\begin{pmatrix}5\\6\end{pmatrix}':
    for reference, answer in (several, '5'), ('5', several):
      assert grader.decide_quickly(
          answer, (grading.Reference(reference),)) == (False, ())


@pytest.mark.parametrize('kind', EQUAL)
def test_equal_answers_vote_together(kind):
  """Except where equivalence is wider: units, percents, decimals."""
  if kind in ('units, percents, degrees', 'decimals', 'bases',
              'names and equations'):
    return
  apart = [pair for pair in EQUAL[kind]
           if len(set(map(grading.canonical_key, pair))) > 1]
  assert len(apart) <= len(EQUAL[kind]) // 3, apart


def test_different_answers_vote_apart():
  """Names and units are ignored: samples of one problem share them."""
  together = [pair for kind, pairs in DIFFERENT.items() for pair in pairs
              if len(set(map(grading.canonical_key, pair))) == 1
              and kind != 'units, percents']
  assert together == [('x=5', 'y=5'), ('x>2', 'y>2')]
