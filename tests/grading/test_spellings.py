r"""Spellings of one answer, by kind, and their neighbours: (reference, answer).

Each kind was once graded wrong; NOT_EQUAL holds the answers nearest to it.
"""

import pytest

from tests.grading import grades

EQUAL = {
    'powers of ten and separators': [
        ('1,000,000', '10^6'), ('10^6', '1,000,000'), ('1,000,000', '10^{6}'),
        (r'1{,}000{,}000', '10^6'), (r'1,\!000,\!000', r'10^6'),
        ('-1,000', '-10^3'), ('2,000,000', r'2\cdot 10^6'),
        ('1,024', '2^{10}'), ('x=1,024', '2^{10}'), ('1,024', 'x=2^{10}'),
        ('1 000 000', '1000000'), (r'1\,000\,000', '10^6'),
        ('1,000,000', '1000000.0'), ('12,345', '12345'),
        ('100, 200', '200, 100'), ('1,000,000', '10⁶'), ('10¹²', '10^{12}'),
        ('5000000', r'5\text{ million}'), ('5 million', '5,000,000'),
        (r'2.5\text{ thousand dollars}', '2500')],
    'money': [
        (r'\$18.90', '18.90 dollars'), (r'\$18.90', r'18.90\text{ dollars}'),
        ('18.90', '18.90 USD'), (r'\$0.50', r'50\text{ cents}'),
        (r'50\text{ cents}', r'\$0.50'), (r'\$0.50', '50 cents'),
        (r'\$5', '5 dollars'), (r'\$1,000', '1000 dollars'),
        (r'\$1,000', r'\text{USD } 1000'), (r'\$1,000', 'USD 1,000'),
        ('5', 'Rs. 5'), ('5', '€5'), ('5', '5 euros'), ('5', '£5'),
        ('5', r'5\text{ pounds}'), ('75', '75¢'), (r'\$0.75', '75¢'),
        (r'5\text{ dollars}', r'\text{\$}5'), ('5', r'\text{Rs } 5')],
    'upright i and e': [
        ('6-5i', r'6-5\mathrm{i}'), ('6-5i', r'6-5\text{i}'),
        ('i', r'\mathrm{i}'), (r'e^{2}', r'\mathrm{e}^2'),
        (r'e^{i\pi/4}', r'\mathrm{e}^{\mathrm{i}\pi/4}'),
        (r'3+4i', r'3+4\mathrm{i}'), ('2i', r'2\mathrm{i}'),
        ('3+4i', r'3 + 4\imath'), (r'\pi i', r'\pi\mathrm{i}'),
        (r'6-5\mathrm{i}', '6-5i')],
    'unions': [
        (r'(-\infty,2)\cup(3,\infty)', r'(-\infty,2)\bigcup(3,\infty)'),
        (r'(-\infty,2)\cup(3,\infty)', r'(3,\infty)\bigcup(-\infty,2)'),
        (r'(-\infty,2)\cup(3,\infty)', r'(-\infty,2) U (3,\infty)'),
        (r'(-\infty,2)\bigcup(3,\infty)', r'x<2\text{ or }x>3'),
        (r'[0,1]\cup[2,3]', r'[0,1]\bigcup [2,3]'),
        (r'\{1\}\cup[2,3]', r'\{1\}\bigcup [2,3]')],
    'words': [
        (r'\text{Yes}', 'yes'), ('yes', 'Yes'), (r'\text{yes}', r'\text{Yes.}'),
        ('Yes', 'YES'), ('No', 'no.'), (r'\text{No}', r'\text{ no }'),
        ('yes', r'\textbf{Yes}'), (r'\text{odd}', 'Odd'), ('all', 'All.'),
        ('No solution', r'\text{no solution}'), ('even', r'\text{Even. }'),
        ('two thirds', 'two  thirds'), ('Yes', r'\mathrm{yes}'),
        (r'\text{Evelyn.}', 'evelyn'), ('none', 'None'), ('True', 'true')],
    'fonts and colours': [
        ('5', r'\boldsymbol{5}'), ('-5', r'-\bm{5}'), ('5', r'\underline{5}'),
        ('5', r'\textcolor{red}{5}'), ('6', r'\textcolor{5}{6}'),
        ('5', r'\color{red}5'), ('x', r'\color{red}x'),
        ('5', r'{\color{blue}{5}}'), ('12', r'1\color{red}2'),
        ('5', r'\bf 5'), ('5', r'{\bf 5}'), ('x+5', r'x+\mathbf{5}'),
        (r'\frac{1}{2}', r'\frac{\bf 1}{\mathrm{2}}'),
        ('12', r'1\textcolor{red}{2}'), ('12', r'\mathbf{1}\mathbf{2}'),
        (r'\pi r^2', r'\pi\color{red}r^2'), ('x^{12}', r'x^\boldsymbol{12}'),
        (r'50\%', r'50\mathrm{\%}'), (r'25\mathrm{\%}', r'25\%'),
        ('x^2', r'\boldsymbol{x}^2'), (r'\boldsymbol{5}', '5'),
        (r'5\text{ m}', r'5\mathbf{m}')],
    'ellipses': [
        (r'1,2,\ldots,n', r'1,2,\dots,n'), (r'1,2,\ldots,n', r'1,2,\cdots,n'),
        (r'1,2,\dots,n', '1,2,...,n'), (r'1,2,\ldots,n', '1, 2, …, n'),
        (r'\{1,2,\ldots,n\}', r'\{1, 2, \cdots, n\}'),
        (r'1+2+\cdots+n', r'1+2+\ldots+n'), (r'1,2,\dotsc,n', r'1,2,\ldots,n'),
        (r'\{1,2,\ldots,2n\}', r'\{1,2,\dots,n+n\}'),
        (r'1,3,5,\ldots', '1,3,5,...')],
    'digits with a base': [
        ('52_8', '(52)_8'), ('(52)_8', '52_{8}'), ('52_8', r'(52)_{8}'),
        (r'2516_8', r'(2516)_{\text{eight}}'), ('101_2', '(101)_2'),
        ('101_2', r'101_{(2)}'), ('A1_{16}', '(a1)_{16}'),
        ('52_8', r'52_\text{eight}'), ('52_8', '52₈'),
        ('52_8', r'52_{\text{base }8}'), ('52_8', r'\text{52}_8')],
    'the empty set': [
        (r'\emptyset', r'\varnothing'), (r'\varnothing', r'\{\}'),
        (r'\emptyset', r'\{ \}'), (r'\emptyset', '∅'), (r'\emptyset', 'Ø'),
        (r'\{\}', r'\text{empty set}'), (r'\emptyset', 'the empty set'),
        (r'\emptyset', r'\left\{\right\}'), (r'x\in\emptyset', r'\varnothing'),
        (r'\emptyset', r'\text{no solution}')],
    'Unicode': [
        (r'\frac14', '¼'), (r'\frac34', '¾'), (r'\frac13', '⅓'),
        (r'\frac23', '⅔'), (r'\frac18', '⅛'), (r'\frac78', '⅞'),
        (r'\frac{11}{4}', '2¾'), (r'2\frac13', '2⅓'), (r'-\frac12', '−½'),
        ('1/4', '1⁄4'), ('x^4', 'x⁴'), ('x^{-1}', 'x⁻¹'), ('x_1', 'x₁'),
        (r'2\sqrt3', '2√3'), (r'\frac{1}{10}', '⅒'), ('3/5', '⅗')],
    'times of day': [
        ('10:30', r'10{:}30'), ('10{:}30', '10:30'), ('10:30', r'10\!:\!30'),
        (r'10{:}30\text{ a.m.}', r'10:30 \text{ AM}'),
        ('10:30 a.m.', '10:30 AM'), (r'10:30\text{ p.m.}', '10:30 pm'),
        (r'10:30\text{ p.m.}', '10{:}30'), ('10:30', r'10:30\text{ p.m.}'),
        (r'7\text{ p.m.}', '7:00 PM'), ('4:05', r'4{:}05')],
    'decimals': [
        ('3.14159', r'\pi'), ('2.71828', 'e'), (r'\pi', '3.14159265359'),
        (r'\sqrt2', '1.41421356237'), ('1/3', '0.33333333'),
        (r'\frac17', '0.142857143'), ('0.5', '0.50000'), ('25', '25.0'),
        (r'0.5\pi', r'\frac\pi2'), ('1.414', r'\sqrt2'),
        ('1.23456', '1.234561'),
        (r'\frac{22}{7}', '3.142857142857')],
    'units': [
        ('5 cm', '5'), ('5 m', '5'), ('5 m', '5m'), (r'5\text{ m}', '5 m'),
        ('5 m', '500 cm'), ('500 cm', '5 m'), ('37/4 m', r'\frac{37}{4}'),
        ('2 h', '120 min'), ('5 s', r'5\text{ seconds}'), ('3 g', '0.003 kg')],
    'infinities': [
        (r'\infty', r'+\infty'), (r'-\infty', r'-\infty'), (r'\infty', '∞'),
        (r'(0,\infty)', 'x>0'), (r'(-\infty,\infty)', r'(-\infty,+\infty)')],
}
NOT_EQUAL = {
    'powers of ten and separators': [
        ('1,000,000', '10^5'), ('1,000,000', '10^7'), ('10^6', '1,000,001'),
        ('1,000', '1'), ('1,000', '1,0'), ('1,2', '12'), ('1,234', '1,235'),
        ('1,2,3', '123'), ('1 2', '12'),
        ('10¹²', '10^1'), ('5', r'5\text{ million}'), ('5 million', '5'),
        ('1,000,000', '0'), ('1,000', r'\{1\}')],
    'money': [
        (r'\$18.90', '19.80 dollars'), (r'\$0.50', '0.50 cents'),
        (r'50\text{ cents}', r'\$50'), (r'\$5', '6 dollars'),
        (r'\$75', '75¢'), ('5', '€6')],
    'upright i and e': [
        ('6-5i', r'6+5\mathrm{i}'), ('5', r'5\mathrm{i}'),
        (r'5\mathrm{i}', '5'), ('i', r'-\mathrm{i}'), ('e^2', r'\mathrm{e}^3'),
        ('2', r'2\text{i}')],
    'unions': [
        (r'(-\infty,2)\cup(3,\infty)', r'(-\infty,2)\bigcap(3,\infty)'),
        (r'(-\infty,2)\cup(3,\infty)', r'(-\infty,2)\bigcup[3,\infty)'),
        (r'(-\infty,2)\cup(3,\infty)', r'(-\infty,2)\cap(3,\infty)'),
        (r'[0,1]\cup[2,3]', r'[0,1] U [2,4]')],
    'words': [
        ('yes', 'no'), ('Yes', r'\text{No.}'), ('odd', 'even'), ('c', 'C'),
        ('yes', 'yesno'), ('AB', 'ab'), ('no', 'o n'), ('No', 'on'),
        ('two thirds', 'two third'), ('yes', 'y'), ('all', 'al'),
        ('no solution', 'one solution')],
    'fonts and colours': [
        ('5', r'\boldsymbol{6}'), ('5', r'\textcolor{5}{6}'),
        ('2', r'1\underline{2}'), ('15', r'3\mathbf{5}'),
        (r'\$', r'\color{red}'), ('x^{12}', r'2 x^\mathbf{1}'),
        ('5', r'\color{5}'), ('5', r'\color{red}'), ('x', r'\bfx'),
        ('x+5', r'x-\mathbf{5}'), (r'5\text{ m}', r'5\mathbf{cm}')],
    'ellipses': [
        (r'1,2,\ldots,n', r'1,2,\dots,m'), (r'1,2,\ldots,n', '1,2,n'),
        ('1,3,5', '1,3,5,...'), (r'1,3,5,\ldots', '1,3,5'),
        (r'1+2+\cdots+n', r'1+2+\ldots+m'), ('0.333', '0.333...'),
        (r'\{1,2,\ldots,n\}', r'\{1,2,\ldots,n+1\}')],
    'digits with a base': [
        ('52_8', '(52)_9'), ('(52)_8', '52_9'), ('52_8', '(25)_8'),
        ('101_2', '(101)_{3}'), ('52_8', '(42)_{10}'), ('52_8', '52₉'),
        ('52_8', r'52_{\text{base }9}')],
    'the empty set': [
        (r'\emptyset', '0'), (r'\emptyset', r'\{0\}'), (r'\{\}', r'\{1\}'),
        (r'\emptyset', r'\{\emptyset\}'), ('0', r'\varnothing'),
        (r'\{1\}', r'\{\}'), (r'\emptyset', r'\text{one solution}'),
        (r'\emptyset', r'\phi')],
    'Unicode': [
        (r'\frac14', '¾'), (r'\frac{11}{4}', '2¼'), ('2¾', r'\frac64'),
        ('1/4', '14'), ('x^4', 'x⁵'), ('x^2', 'x₂'), ('10^{12}', '10¹³')],
    'times of day': [
        ('10:30', r'10{:}31'), (r'10:30\text{ a.m.}', r'10:30\text{ p.m.}'),
        ('10:30', '30:10'), (r'10:30\text{ a.m.}', r'1:3'),
        (r'7\text{ p.m.}', '7:30 PM'), ('10:30', '10.30'),
        (r'10:30\text{ a.m.}', r'\frac13')],
    'decimals': [
        (r'\pi', '3.14159'), (r'\pi', '3.1415926'), ('e', '2.71828'),
        ('e', '2.7182818'), (r'e', r'1.000001^{1000000}'),
        ('e', r'(1+10^{-9})^{1000000000}'), (r'\sqrt2', '1.414214'),
        (r'2\pi', '6.283185'), (r'\pi^2', '9.8696'),
        (r'\pi', r'\frac{355}{113}'),
        ('8148685', '8148685.5'), ('1000000', '1000000.5'),
        ('1234567.5', '1234567'), ('0.333333', '0.33334'), ('1.5', '1.5001'),
        ('1/3', '0.33334'), ('1/3', '0.33333'), ('2.5', '2.50001'),
        (r'\frac17', '0.14286'), ('0.125', '0.12501'), ('16', '15.9999999'),
        (r'\frac{4036082}{4036081}', '1.0'),
        (r'2^{101}-1', '2^{101}-1.5'), (r'\ln 2', '0.693147'),
        ('2.5', '2.6')],
    'units': [
        ('5', '5 m'), ('5 cm', '5 m'), ('5 m', '5 cm'), (r'5\text{ cm}', '5 m'),
        ('5 m', '50 cm'), ('5 m', '5 s'), ('2 h', '2 min'), ('5 m', '6 m'),
        (r'5\text{ mm}', '5 m'), ('3 g', '3 kg')],
    'infinities': [
        (r'(0,\infty)', '(0,2.5)'), (r'\infty', '0.5'), (r'-\infty', '0.5'),
        (r'(-\infty,\infty)', '(0.1,0.2)'), (r'x<\infty', 'x<0.1'),
        (r'\infty', r'-\infty'), (r'\infty', '10^{100}'), ('5', r'\infty'),
        (r'5\sqrt2-3', r'\infty\sqrt2-3'), ('6+9i', r'\infty+9i'),
        ('x+1', r'x+\infty'), ('2.5', r'\infty'), (r'\frac12', r'\frac1\infty'),
        ('0', r'\frac{1}{\infty}'), (r'\infty', r'\infty+i'), ('0', r'\infty'),
        (r'(-\infty,3]', '(-5,3]'), (r'x=\infty', 'x=3.5')],
    'division by zero': [
        ('x+1', r'\frac{1}{0}x+1'), ('5', r'\frac50'), ('0', r'\frac00'),
        (r'\frac13a+\frac23b', r'\frac10a+\frac23b'), ('1,2', r'1,\frac20')],
    'floors': [
        (r'\lceil\frac n2\rceil', r'\lceil\frac n{12}\rceil'),
        (r'm-\lfloor m/2\rfloor', r'm-\lfloor y/2\rfloor'),
        (r'\lfloor\sqrt n\rfloor', r'\lfloor\sqrt{n-1}\rfloor'),
        (r'1+\lceil\frac n2\rceil', r'1+\lceil\frac ne\rceil'),
        (r'\lfloor\log_2 n\rfloor', r'\lfloor\log_2 m\rfloor')],
    'terms too small to see': [
        (r'\frac14+\frac{3}{4\cdot5^{2008}}', r'\frac14+\frac{3}{4e^{2008}}'),
        ('16^{2014}-14^{2014}', '16^{2014}-13^{2014}'),
        (r'\sqrt{\frac{2^{2009}-1}{3\cdot2^{2008}-1}}',
         r'\sqrt{\frac{2^{2009}-1}{3\cdot2^{2008}+9}}'),
        ('x^{9900}+x^{9999}+x^{10100}', 'yx^{9900}+x^{9999}+x^{10100}'),
        (r'2^{300}+\pi', r'2^{300}+e')],
    'Python': [
        ('1', 'lambda: 1'), ('1', 'lambda x: 1'), ('1', 'lambda x:1'),
        ('1', 'else: 1'), ('1', 'return 1'), ('1', '1 if True else 2'),
        ('1', '[1][0]'), ('1', '1#'), ('1', 'print(1)'),
        ('1', 'int(1)'), ('1', '1 or 2'), ('1', 'x:=1')],
    'text in place of a unit': [
        ('5.4', r'5.4\text{ ce3.14ts}'), ('25', r'25\mathrm{-\infty}'),
        ('3', r'3\mathrm{4}'), ('5', r'5\text{+1}'), ('5', r'5\text{ or 6}')],
}


@pytest.mark.parametrize('kind', EQUAL)
def test_equal(kind):
  assert not grades.with_verdict(EQUAL[kind], False)


@pytest.mark.parametrize('kind', NOT_EQUAL)
def test_not_equal(kind):
  assert not grades.with_verdict(NOT_EQUAL[kind], True)
