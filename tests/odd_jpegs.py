"""JPEGs of kinds that none of the tests' required encoders writes.

Each is `drawn(57, 83)` of pictures.py, encoded by libjpeg-turbo's cjpeg at a quality of 60.
"""

from __future__ import annotations

import base64
from typing import Final

SIZE: Final = (57, 83)
_ENCODED: Final = {
    "arithmetic": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2J01*fPIRH}w0U`hb5di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zfIW-
t^lkM}W7I8;+oC?RRGc%ItbcXp2W9qct7Y*F$qj(mRM-CfE0gmuFS21|10X^q)aDe<!PqI#%>-p>)~rRcMDr$QzS-
m8;cWGQJ8g~0V%pv}Mo7r?Jdk)*i$T7O-w)skGvEgIEEx;(z+l#w*x3=kb2);hiby+eq528FL#B;V&RB4-
fYilPKYh;so6SrBd>;dg5a-2^zdP1HbaAi+T`HbLKytK-
B`J^ujZW8*ccAPZ`>OGCVBtUpdAK*V~UxC8`~Nz19Uz9UrLJ3FUSOoyEy13RL6j&}k_-
(y4<xeQ>S^Oj!~VJgeU)54bDu+k)P0py$WNlr^fHT~XID3C*xeQ_6iig8MD$3XF4ip3ae1r5wU{{RXZU+)YDqMjnE@mr=}Z3?+
^VqNj2uU00c*9e8Kx))6NSKsl0lawoD9ENuQw3~8MhY&H8grS?fE@;%P9(Y>r_&@Tf_g)dd(5K%mABv^H?o%57030LP9u)*q3J
@x}q*G+Dv`<8&gegT+xhJ)|h8PBmb3_vXbw<fVGG>_n0EiAi|Je
""",
    "arithmetic, progressive": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2K01*fPIRH}w0U`hb5di}c0sqVZ1^^HN5dYc$3<CiG0uTcb0005e!r`7?LbFBdGRIreQP}7g%rxbc;E_Cj@Z}BA0ZYrkXVwE
{w2<fDap2LF{PWI60K1oLiD$&l0h02-
$Rfn1Y$CiyYgHbl%Vaw|rzAA|=+8LEVF+of6?UL?fd2rvrY0`1V*tkJfd9+@1P}%P+5iXv0RRC70s;-
)7Cb>@s(3FQ3y*`qI)}bPgB*7tmsuB5^;$^sq(lm5(z_ad0Dr!|bBgJOWoSr*5@`R-
00a>Q|Jncu0RsU6KLHd&%Y4@=#wyo@3g?HcJ#U6DaWli*XdS1;4uJp600a>Q|Jncu0RjO5KLI_#9SX8Zklxd&b+o(It?MeuH?t
JN->}4$(bVH!j3EEa00a;P|Jncu0RaF8KLV)#%m4%s1^?Or2mt{A0Y4#~niuZ~$c3gMaMsG4GqL+j1;I;T3%Yewi#-
GLUD5kA!2j9+3<CiG0ssR5000orOO&QI4u7}zLtm4>4LP_9`hfq;00a>Q|Jncu0RsU6KM<o>q3~%*iCeGxTgf`dtX+Hn4zH|W^
#9BN1Q7-
Q+5iXv0s#R(5LpcxS!F9Z84a>?K~+T5v}{H&WYz#h6#vWs1P}%P+5iXv0RRC%5ORILSgTr8JGa<KVmg>(7A9=X1IPaW2J8`!0s
GMpMVLedE7$)3{(4|*k99!28@3{es;xe!nxrFihp#Xi)L$AYI-
MlAw#G0HBXeRo7O34wTxE(v1wPBqQ|f=_A}~-qy2oK{Bh>Z(*#
""",
    "four pixels across a colour": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2A01*fPIRH}w0YLx)5di}c0sq7R8UO(S00RL50000000000000F900IL62LHqWAP@io0s{d60|5a500000000010}%oQAu%F
BVG_ar!~hrp0RaI40RR9100000000001_c8I0{_GSArSxp0|fyA00RI300000000010s{mE5fUOHGBGnj|Jncy0|5X65d#qbKL
Gle@kt)%ogxjHsXl^kPwz>yzb`hTZy-
B!UGye=uP4)j!r5ND7W^pFH^a?J;YM`zy0|^3t;NAiVECgAo}QfTUkjd8OFXo_3EQ90J-
NLgqU|A0k(i7lV>a0%#kO{a7TBhyz1IX(%;cX~??-gCs<<_+3Q2IaN6!pAO1M)P{X%&prRa9d-t-
@8UqUuBwm_wB&o4yXVj;~o&tr<&ezv{+4QcE7!DLLs1ND#WYgP(Nf>Gi8uMO<NZ13pO6w5*<mDi!0GW*b-
jPA%K>nGb|%d#MHYZ1>F?f6#&9TnBr^Mg9DRd7=D)-
at*vml%}QaZMhIJtUYZg=)lr*8n0$Q!YpzeDBgXBUODuGJUxvsSvqb&4BkM_LcTZD@SpoH5Z_vD&a2_1aRE#BiEgOou7@`iu!m
{J2F*&I0DlhF4_yV{G>bt%_~Y>cg(&?PDu~9{4A(58#wB(nVORFuBQuz(OviJd-
*>`!iBuna}cO1+$e=bvrmijI5s}Y}H|95k>err*4s)*N5Syutng6G0|QMjk3;=a_cTv0m>xWLRsbDR@Bd-
xl8hWFp~pzL8MK?P^M2=$(vwPfbBn7BK7z!hy5&z)KT<lpNJuI`XbwY$aX@uePP*pVU;Jy%|1~7*#
""",
    "two pixels down a colour": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2A01*fPIRH}w0TKWL5di}c0sq7R8UO(S0RaI40RR9100000000C71pxv82LHqWAP@io0s{d60|5a500000000010}%oQAu%F
BVG_ar!~hxr0RRI50RaF200000000001OfvE00sg7!~h!+00RL50RaI30000000000009F65d;$<|Jncy0|5X65d#qbKLGtqc%
+Y>R0f`&hm=m|ogkCTOVGNzW{luZW@=BSZruKmTWnrr8*+boW^K*sc5>M_js)A9@1XWGZHvU4DBIv!^1Po;JX>Qi78iR&Ru;xX
3v5ne7j#E8;J4wcsjqdye=Zcd6w}t~;j^W!Rl+X^EtS*O;^C{U3Q2IMNg~CroW>7|9HZxje}w-4L&+sCLC-
6%Pc_!fNqP87W^Z~2W?y<+iMBT~;9aSG2eF;l>3N$Z(m^&ewoYENN?uTu+Cg(ove?IO!SnMO)v_fVR?P??=%o~l`dsF=z5N>6y
8dwIl!EHLDW|XJ4P96&xKX{Na?@pXV5GP@94P{&k`aX2Nbvqwhg(Sm-NoW;^<mt-DEkQc7?a2vY|5qNZ1fqzLAEou=_y^Baq*u
uq=HM<&v|2P(w~(e6|zB|7R6x|v6+%aRs95_hT1eBhrSbhMqO{yy3l?aTJZh`rIH5e(wflu!O+J^0I#JYS?endbXOHdZGA%}Hp
(s{QfEjG{XI0L1I*IWV0LDt${kxDIG<%dUs0Ky{{SX;SdWnzS@fQ>*h)D_(A(k<lD2zebA*iRQIc3$d<!4pje6+pQGN)(r*vq^
ts5%@UI>T%0b6Jmw8TRl6pPel+WIGj()cPn^k!Dt9~q{1Ea?-^#1C6+){M~^<=}miEA-
Tq&@HK-L+tv*PYH`zNG?+RpGals#U;Wmpa0n
""",
    "eight pixels a colour, lying": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2A01*fPIRH}w0YU%*5di}c0sq7R8UO$T00RL40000000000000971popD0sq7RAP@io0s{d60|5a500000000010}%oQAu%F
BVG_ar!~hrp00RL50000000000000001O)~I0sq7R9uWWn0|5X60{{R3000000003300R*O1rie>BLCU|3<CiG0ucid06zfgW5
pzUo^*sZW~BN=+@Ic^OUi|3mY1ZRx&0yS&FHD@HastmtWAn-&3DpF`Cd<;78b_!;J4syjN4+57T9QEZIv}O?zlPTtMjmKr^5-
St<}Qzp0^hYn8EQz5wx|cxLVeQB)B@G=Y}1y0A>huMdXr~r0to#=^tueNgEm4J4xkr=`&_udP&&M>_T3#Hw`Ao*!frEsw<jpp2
roj{cU^tEotld!<)uCeht9~O1irKaI>ogR|=qlw39tn>*Ox16qgE7;ry=+?7$G=NGoX|E?$@<zVFm8oi$`h<R<KAZ_<3dYzxBK
er&{Lb}yDT&v1&^e~jhz8e^X4`0L0hp|*-
T(0&!Qq4R|}W22RV9{5w&hw!Bgbdc66jr@hd7bJLNWw48g1k%!CIZxNrVM0vl6ZU4L$(hgcW)h8IW3r=~tVkJHzDn7u!p0(t@Y
+vUCT)Pu1<h&_zp00rat1=d7ljC8p}Z9vWt}2aKj`FMp^u|X{6x2uwTomyz`oXfz|SuUTT?!ha+l=#VSi+mv+E~i>3}@Q7-
^P>0;r$=*#
""",
    "eight pixels a colour, standing": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2A01*fPIRH}w0VDtd5di}c0sq7R8UO$S0|5a50000000000000C9009F62LHqWAP@io0s{d60|5a500000000010}%oQAu%F
BVG_ar!~hoo0RaI40000000000000001O)~I|HJ?u5dZ=M00RL50RR9100000009C30|XNxF$ED4|Jncy0|5X65d#qbKLGVH;*
u{s=@jyyS>>ha)RI#4U9&g6HJ(>qi#BEVq*l>ohp5chzXx&7%+#Mmo0I#{ow@xH?ak<3)V_)~GqxA8o!A7uVyMky#xg1iuH4ss
6wj69`W3O8Y!Twy2+cOjjw@!k$8W&6An9hDBzq<3(4rt%TMO5M--
W{qY-y>lb;F%)d-@$|>-obyU4J+^)q<;nO)7#+Z6Bwp<+Sy>xIWX?;^CH-wO0pP(4?0PwP2*UGLH}CcxMh2jax|qw!~T5zv-
YD!SO^6QS-tb*#X?WAZ~Sv<7kq31-
lvB^d@Y;Wp)!Q2gzFqlh$O%X8DRcGeK*L!~$NnV(_*TmNv`6D`v|J2#PPlunEAbwO3H`XEyFW2$Cpmp^mg4g+UK|8SBINaRgor
A&!CJ{{TZG^#jqgAnHPEnam4XA2>6HIx>bjNGlaacq%%}Iz@dPXW}4f`Ye2p%bc<96u68gmXkV@Izs)KsWVyS;Hzq9(A|+%&#a
%y_8Fn0AObkbe!ij$GoR$h0hGTd(immw4*V?@#<Ty~
""",
    "restarts every row": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2A01*fPIRH}w0U`hb5di}c0sq7R8UO$T0RaI40000000000000971pxp82LHqWAP@io0s{d60|5a500000000010}%oQAu%F
BVG_ar!~hxr0RRI50RaF200000000001p@>I0s#R3!~h%-
00IL60RaI30000000000009C65d<L;6aU=+1ONvA+5ij#0RRFK0}%i}0Q#8mNgJMYjCoM3^3wD&?u}>Mw1e52lj#$3e|j^wKcq
dmy&{ImimLGnZOwPmO!;0<qgxra#U3rON-
1osbdmzFwl}W@zYT^K*;7+q>w*!h5Nz!9CZ4xf3)*_zTm_}ARl?S^DJ8>+#UseeOvVq2IC)3U4j|M^>HpCB86>6YJ7#Zs7I|HI
Oxc&-ndn8$i}TZnS888L8yVXh*v{-iUa_uTX3p+vC|5MwHaM+?#yfru!3RfbqvZhf+-
A1D{T8(K{NO!Ze>hpyf~$wNWKeJ3u)45PTq#F~^1KHQ6oR&r3BKfuw8gX4oG#_*#Xs1+`5*t$W_by_8Qb(`Y{X@DLCMFak);@l
OV+@=EsW)jvv7*pqNANf0`^~kqK4Wi>p}Qr5ck5Kyg!7N%|RKvt=1D-
A2?HnIt2`Lkk%@I`nry&i<1brfK4qXdXqXt{h6sSOD}R`{M7h%Q}y*6OwNCkIOAA{<bVIt6s%t*Y+_GXCO1V<NPDJjAWI7viZ8
=38NjhQe6I|jZLdPX7ljC8p?H7M$h|;)cSs>UkbD&$vd)p8M~wVNa{DCM=N)Ja^6-
_lGwANgD`(b6QrGFErU@ZjrTIRb120YyRV*aa|Je
""",
    "progressive, without its last bits": """
|JeWF01!$>Nk#wx0RR9200961|JwjV01XKW3knDg3knMk4h;_zAQcl55)&sJ9v2`kDKRiEDJ?8BI!Zn>HbyrrEkIX6ModmpQ&K
WMT47pHU`kO^PygEhLjevB4iga*CKVMXPc<zyPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zPft%zP
f!2C01*fPIRH}w0U`hb5di}c0sq7R82|tS0RaI30000000000000651ONdA|HJ?p0RaF50RaF2000000000000aU91pop6+5ij
#0RRFJ0}ucJ0rfk@7ltN76)HxhRRgt1F<v&uxu2mW&QoT!QMz`?T_-#ov~A-
RB4oR{dYj>ysFs33yF^1qrdg#>G(M1aaX)EvPzzw~*bL0GB<Nd$GwvMc1g@4kO3TQX|HJ?p5CH)J0RaI30000000000009635D
_5%+5iXv0RRC70y(DJX`W=Un;E>~+HE$t7IR}ZOUZ3En_LSyv701uZ8oOz3puh!J(kq)ES5+(x3fI*3nUzEH?z=!4y~s4ehBWZ
bN|Eu9T5Nm0s{a80000000000000020Rs>b5+N}`|Jncu0RsU6KLM!@N0L~H#b`f*$2KG!o}jtMVIyT|a#<zJeJN2RAOFMv8xa
5k0{{a60000000000000020Rs^b5+VQE00;pB0RcY&dkFMIAxVxRG^(*v2Jm+~l~N^mG~sQdKJbeK&KA6m(kayc!~hf!0RR910
00000000000000VE@_x2mt{A20sEZ|Je
""",
}
JPEGS: Final = {kind: base64.b85decode("".join(text.split())) for kind, text in _ENCODED.items()}
