r"""Right answers and their wrong neighbours: {heading: [(reference, answer)]}.

RIGHT lists spellings that people and models use. WRONG lists what was once
accepted, or is nearest to what is: each heading has at least five of each.
"""

import pytest

from tests.grading import grades

RIGHT = {
    'sizes': [
        ('5', '(' * 60 + '5' + ')' * 60), ('3', '((((((((1+2))))))))'),
        ('2^{2^{100}}', '2^{2^{100}}'), ('1000000!', '(1000000)!'),
        ('2^{1000}', '4^{500}'), ('9^{9^{9}}', '9^{9^9}')],
    'equations for numbers': [
        ('12', '12=n'), ('y=2x+3', '2x+3=y'),
        ('10', 'x=10'), ('10', '3+7=10'), ('6', r'\frac{12}{2}=6'),
        ('10', r'\text{Area}=10'), ('10', r'f(3)=10'), ('10', '2+8=3+7=10'),
        ('10', r'\angle ABC=10'), ('10', r'|AB|=10'), ('10', r'x_1=10')],
    'values of named unknowns': [
        ('x=5,y=2', 'x=5,y=2'), ('x=5,y=2', 'y=2,x=5'), ('x=5,y=2', '(5,2)'),
        ('x=5,y=2', '5,2'), ('(x,y)=(5,2)', 'y=2,x=5'), ('(5,2)', 'x=5,y=2'),
        ('x=5,y=2', r'x=5\text{ and }y=2'), ('x=5,x=2', '2,5'),
        ('p=5,q=2;p=7,q=2', 'p=7,q=2;p=5,q=2'), ('(5,2),(7,2)',
         'p=5,q=2;p=7,q=2')],
    'words after numbers': [
        (r'500', r'5\text{ hundred}'), ('60', r'5\text{ dozen}'),
        ('25', r'5\text{ squared}'), ('120', r'5\text{ factorial}'),
        (r'\frac52', r'5\text{ halves}'), ('0.5', r'5\text{ tenths}'),
        (r'2\text{ kg}', r'2000\text{ g}'),
        (r'3\text{ liters}', r'3000\text{ ml}'), (r'5\text{ N}', '5'),
        ('5000 N', r'5\text{ kN}'), (r'\pi\text{ radians}', r'180^\circ'),
        (r'5\text{ g m}', r'5\text{ g}\cdot\text{m}'),
        (r'2\text{ years}', r'24\text{ months}'),
        ('10m', '10'), ('10 s', r'10\text{ seconds}'), ('10m', '10m'),
        (r'3\text{ apples}', '3'), ('3', r'3\text{ apples}')],
    'words': [
        (r'\text{cat}', 'cat'), ('HTH', r'\text{HTH}'), ('IV', 'IV'),
        ('red', 'Red'), (r'\text{red}', r'\textbf{RED}'),
        ('hth', r'\text{HTH}'),
        (r'\text{TRUE}', 'True'), (r'\text{A},\text{B}', 'A, B')],
    'one answer, two readings': [
        ('32349', '32,349'), ('32349', r'32,\! 349'), ('1,234', '1234'),
        ('32,349', '32349'),
        ('1, 234', '234, 1'), ('1,234', '1,234'), ('(1,234)', '(1, 234)')],
    'intervals': [
        ('[1,3)', r'x\ge1, x<3'), ('x>3', r'x>1\text{ and }x>3'),
        (r'(0,1)\cup(1,\infty)', r'x>0, x\ne1'),
        (r'0<x<2, x\ne1', r'(0,1)\cup(1,2)'),
        (r'(0,9)\cup(9,36)', r'((0,9)\cup(9,36))'),
        (r'|x|\ge2', r'x\le-2\text{ or }x\ge2'), ('|x|<3', '(-3,3)'),
        ('(2,251,252)', '((2,251,252))'),
        (r'1\le x\le2', r'x\in[1,2]'), (r'[1,2]', r'x\ge1\text{ and }x\le2'),
        ('[1,2]', r'\{x\mid 1\le x\le2\}'), ('[1,2]', r'\{x : 1\le x\le2\}'),
        (r'x\in[1,2]', r'\{x\in\mathbb{R}\mid 1\le x\le2\}'),
        (r'x\ge1\text{ and }x\le2', '[1,2]'), (r'1\le x\le 2', '[1,2]'),
        (r'k\geqslant2', r'[2,\infty)'), (r'k\ge2', r'k\in[2,\infty)'),
        (r'\mathbb R', r'(-\infty,\infty)'), (r'x\in\mathbb{R}', r'\mathbb R'),
        (r'(-\infty,\infty)', r'\mathbb{R}'),
        (r'\mathbb R\setminus\{0\}', r'(-\infty,0)\cup(0,\infty)'),
        (r'(-\infty,0)\cup(0,\infty)', r'x\ne0'),
        (r'(-\infty,1)\cup(2,\infty)', r'x<1\text{ or }x>2'),
        (r'(-\infty,1)\cup(2,\infty)', r'x\in(-\infty,1)\cup(2,\infty)'),
        (r'x<1\text{ or }x>2', r'\{x\mid x<1\text{ or }x>2\}'),
        (r'\infty', r'\text{infinity}'), (r'\infty', 'infinity'),
        (r'-\infty', '-infinity')],
    'lists': [
        ('(1,2)', '(1;2)'), ('1,2', r'(x=1\text{ or }x=2)'),
        ('1,2,3', r'\{1,2\text{ and }3\}'),
        ('21,16,11', r'21, 16 \text{ or } 11'), ('1,2,3', r'x=1,2\text{ or }3'),
        ('x=1,2', 'x=1, x=2'), (r'\text{A},\text{B}', r'\text{B},\text{A}'),
        (r'(\text{A},\text{B})', '(A,B)'), (r'\{1,1,2\}', r'\{1,2\}'),
        (r'\{1,2\}', r'\{2,1,1\}'),
        (r'1+\sqrt2,1-\sqrt2,-1+\sqrt2,-1-\sqrt2', r'\pm1\pm\sqrt2'),
        (r'\pm1\pm\sqrt2', r'\pm1\pm\sqrt2'), ('21,16,11', '11, 16, and 21')],
    'names': [
        ('y=2x+3', 'f(x)=2x+3'), ('f(x)=2x+3', 'y=2x+3'),
        ('f(x)=2x', 'f(n)=2n'), ('f(n)=2n', 'f(x)=2x'), ('f(x)=2x', '2x'),
        (r'(1,2)', r'\vec v=(1,2)'), ('18', '= 18'), ('18', 'x = 18'),
        (r'\vec{v}=(1,2)', '(1,2)'), ('y=x^2', 'f(x)=x^2')],
    'dress': [
        ('12', '12 eggs'), ('5', '5 m/s'), ('5', r'5\text{ kg m/s}^2'),
        ('5', '5 kg m/s^2'), (r'50\%', r'50\text{ percent}'),
        (r'28\%', '28 pct'), ('5', '5th'), ('12', r'{\large 12}'),
        ('12', r'\text{Answer: }12'), ('34', '**Answer**: 34'),
        ('1:2', '1：2'), ('5', '5 см'), ('5', '5 米'),
        (r'\begin{pmatrix}1&2\\3&4\end{pmatrix}',
         r'\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}'),
        (r'\frac13', r'0.\dot{3}'), (r'\frac{3\pi}{4}', '135^\\circ'),
        (r'\frac{3\pi}{4}', r'135\text{ degrees}'), ('5', '(C) 5'),
        ('C', r'\text{Option C}'), ('C', 'Option C'), (r'\alpha+1', 'α+1'),
        (r'8{:}34\text{ p.m.}', '8:34 PM'), ('C', r'\text{(C) }5')],
    'functions': [
        (r'\coth 1', r'\frac{\cosh 1}{\sinh 1}'),
        (r'\operatorname{sech} 1', r'\frac{1}{\cosh 1}'),
        (r'\sinh^{-1}(1)', r'\ln(1+\sqrt2)'),
        (r'\cot^{-1}(1)', r'\frac\pi4'), (r'\operatorname{arcsec} 2',
         r'\frac\pi3'), (r'17\bmod 5', '2'), (r'\gcd(12,18)', '6'),
        (r'\operatorname{Re}(3+4i)', '3'), (r'\overline{3+4i}', '3-4i'),
        ('2|x|+|y|', '|y|+2|x|'), (r'3\pmod 5', r'3'),
        (r'x\equiv3\pmod 5', r'3\pmod{5}'), (r'\max(2,3)', '3')],
}
WRONG = {
    'sizes': [
        ('6', '(' * 60 + '5' + ')' * 60), ('1', r'2^{2^{100}}'),
        ('2^{2^{100}}', '2^{2^{101}}'), ('5', r'9^{9^{9^9}}'),
        ('5', '1000000!'), ('5', r'\max(9^{9^{9^9}},5)'),
        ('1000000!', '1000001!'), ('5', '((((9!)!)!)!)!'),
        ('5', '9**9**9**9'), ('5', r'\binom{10^9}{10^8}')],
    'equations for numbers': [
        ('12', '12=2n'), ('y=2x+3', '2x+3=2y'),
        ('10', '3x+4y=10'), ('6', '7=6'), ('13', '13_{12}'), ('10', '2x=10'),
        ('10', 'x+y=10'), ('6', r'\sqrt{7}=6'), ('10', 'x^2=10'),
        ('5', r'7\approx 5'), ('13', r'52_8=13'), ('10', '3+4=10')],
    'values of named unknowns': [
        ('(x,y,z)=(1,2,3)', '(x,y,z)=(1,2)'),
        ('x=5,y=2', '2,5'), ('x=5,y=2', 'x=2,y=5'), ('x=5,y=2', '(2,5)'),
        ('(x,y)=(5,2)', 'y=5,x=2'), ('x=5,y=2', 'x=5'),
        ('p=5,q=2;p=7,q=2', 'p=5,q=2;p=2,q=7'), ('x=5,y=2', r'\{2,5\}'),
        ('x=5,y=2', 'a=5,b=2'), ('x=5,y=2', 'x=5,x=2'), ('x=5,x=2', 'x=5,y=2')],
    'words after numbers': [
        (r'7\text{ dollars}', r'7\text{ percent}'), ('7 kg', r'7\%'),
        ('5', r'5\text{ hundred}'), ('5', r'5\text{ dozen}'),
        ('5', r'5\text{ squared}'), ('5', r'5\text{ factorial}'),
        ('5', r'5\text{ halves}'), ('5', r'5\text{ tenths}'),
        (r'2\text{ kg}', r'2\text{ lb}'),
        (r'5\text{ months}', r'5\text{ years}'),
        (r'3\text{ ml}', r'3\text{ liters}'), (r'5\text{ N}', r'5\text{ kN}'),
        (r'90^\circ', r'90\text{ radians}'),
        (r'5\text{ g m}', r'5\text{ kg m}'), ('10', '10m'), ('10', '10s'),
        (r'15\text{ cm}^2', r'15\text{ cm}^0'),
        (r'3\text{ apples}', r'3\text{ pears}'),
        (r'5\text{ wibbles}', r'5\text{ wobbles}'), ('10m', '10n')],
    'words': [
        (r'\text{cat}', r'\text{act}'), ('HTH', 'HHT'), ('IV', 'VI'),
        (r'\text{HTH}', 'HHT'), (r'\text{ab}', 'ba'),
        ('HTT', r'\text{THT}'), (r'\text{cat}', 'c+a+t')],
    'one answer, two readings': [
        ('32349', '32, 349'), ('1, 234', '1234'), ('1, 234', '1,235'),
        ('1234', '1, 234'), ('1234', '(1,234)'), ('32349', '349, 32')],
    'intervals': [
        ('x>1', r'x>1\text{ and }x>3'), ('1<x<3', r'x>3\text{ and }x<1'),
        ('x>0', r'x>0, x\ne1'), ('|x|<3', 'x<3'), ('|x|>2', 'x>2'),
        ('|x|>2', r'(-\infty,-2]\cup[2,\infty)'), ('|x|>-1', 'x>-1'),
        ('[1,2]', r'\{x\mid 1< x\le2\}'), ('[1,2]', r'x\ge1\text{ or }x\le2'),
        (r'\mathbb R\setminus\{0\}', r'\mathbb R'),
        (r'(-\infty,\infty)', r'\mathbb Z'), (r'\mathbb R', r'(0,\infty)'),
        (r'x\ne0', r'(-\infty,0)\cup(1,\infty)'), (r'\infty', '-infinity'),
        (r'k\geqslant2', r'(2,\infty)'), ('[1,2]', r'x\ge1'),
        (r'x\in[1,2]', r'\{1,2\}'), ('[1,2]', r'\{y\mid 1\le x\le2\}'),
        (r'\mathbb R\setminus\{0\}', r'\mathbb R\setminus\{1\}')],
    'lists': [
        ('21,16,11', r'21, 16 \text{ or } 12'), ('1,2,3', r'x=1,2\text{ or }4'),
        (r'\text{A},\text{B}', r'\text{A},\text{C}'),
        (r'(\text{A},\text{B})', '(B,A)'), (r'\{1,2\}', r'\{1,1,3\}'),
        (r'\pm1\pm\sqrt2', r'1\pm\sqrt2'), (r'\pm1\pm\sqrt2', r'\pm(1+\sqrt2)'),
        ('1,1,2', '1,2'), ('(1,1,2)', '(1,2)')],
    'names': [
        ('y=2x+3', 'f(x)=2x+4'), ('f(x)=2x', 'f(n)=2x'), ('f(x)=2x', 'f(n)=3n'),
        ('18', '= 19'), ('(1,2)', r'\vec v=(2,1)'), ('f(x)=2x', '2y'),
        ('f(x,y)=2x+y', 'f(y,x)=2x+y'), ("f(x)=2x", "f'(x)=2x"),
        ('f(x)=x^2', 'g(x)=x^2'),
        (r'\sin(x)=\frac12', r'\cos(x)=\frac12'), ('P(A)=0.5', 'P(B)=0.5'),
        ('18', '18=')],
    'dress': [
        ('12', '13 eggs'), ('5', '6 m/s'), (r'50\%', r'51\text{ percent}'),
        ('5', '6th'), ('12', r'\text{Answer: }13'), (r'\frac13', r'0.\dot{4}'),
        (r'\frac{3\pi}{4}', r'134^\circ'), ('5', '(C) 6'), ('C', 'Option D'),
        (r'\alpha+1', 'β+1'), (r'8{:}34\text{ p.m.}', '8:34 AM'),
        ('12', '12 or 13 eggs'), ('C', 'Option'), ('D', '(C) D'),
        (r'\frac{3\pi}{4}', '135')],
    'functions': [
        (r'\coth 1', r'\tanh 1'), (r'\operatorname{sech} 1', r'\cosh 1'),
        (r'\sinh^{-1}(1)', r'\frac{1}{\sinh 1}'),
        (r'\cot^{-1}(1)', r'\cot 1'), (r'17\bmod 5', '3'),
        (r'\gcd(12,18)', '3'), (r'\operatorname{Re}(3+4i)', '4'),
        (r'\overline{3+4i}', '3+4i'), ('2|x|+|y|', '|x|+2|y|'),
        (r'3\pmod 5', r'2\pmod 5'), (r'3\pmod 5', r'3\pmod 7'),
        (r'\max(2,3)', '2')],
}


@pytest.mark.parametrize('heading', RIGHT)
def test_right(heading):
  assert not grades.with_verdict(RIGHT[heading], False)


@pytest.mark.parametrize('heading', WRONG)
def test_wrong(heading):
  assert not grades.with_verdict(WRONG[heading], True)
