"""Published results that docs/multicentre.md shows beside those of polyfed: FLamby's own tables.

Computed from FLamby's result files (`owkin/FLamby` at edacf54d, `flamby/results`), five training seeds on one fixed split:
mean ± standard deviation over seeds. They have no interval over test patients.
"""

HEART = """### FLamby's table

Accuracy in %, on one fixed third of each hospital's patients, mean ± standard deviation over five training seeds (`owkin/FLamby`, its result files): the number of
test patients is in brackets. One test patient of Switzerland is 6.25 points, and no interval over patients is given.

| method | Cleveland (104) | Hungary (89) | Switzerland (16) | VA (45) | mean |
|---|---|---|---|---|---|
| **each hospital's own model** | 74.6 ± 1.4 | 74.6 ± 0.6 | 80.0 ± 7.3 | 70.2 ± 4.6 | **74.9** |
| pooled data | 78.3 ± 1.0 | 76.4 ± 0.0 | 75.0 ± 0.0 | 64.4 ± 0.0 | 73.5 |
| FedAvg | 73.1 ± 1.9 | 71.9 ± 2.9 | 65.0 ± 10.2 | 64.0 ± 4.5 | 68.5 |
| FedAdam | 75.2 ± 1.5 | 74.6 ± 1.7 | 73.8 ± 2.5 | 66.7 ± 4.0 | 72.6 |
| FedYogi, FedAdagrad | 76.0 ± 1.6 | 75.3 ± 1.6 | 73.8 ± 2.5 | 67.6 ± 3.6 | 73.2 |
| FedAvg with fine-tuning (its own configuration; without 71.8 ± 1.4) | | | | | 73.5 ± 0.8 |

No federated method of that table is above training alone in the mean. The two tables have other splits, searches and numbers of updates, so that their levels do not compare;
what each says of joining does."""  # noqa: E501
BRCA = """### FLamby's table, and a paper that contradicts it

C-index on FLamby's fixed split, mean ± standard deviation over five training seeds (`owkin/FLamby`, its result files).

| method | Northeast | South | West | Midwest | Europe | Canada | mean |
|---|---|---|---|---|---|---|---|
| test events (patients) | 14 (63) | 4 (40) | 8 (42) | 3 (33) | 2 (33) | **1** (11) | |
| each region's own model | .644 | .527 | .850 | .596 | .851 | .667 | .689 |
| pooled data | .773 ± .059 | .582 ± .157 | .706 ± .140 | .629 ± .134 | .766 ± .244 | .600 ± .249 | .676 |
| FedAvg | .745 ± .089 | .627 ± .204 | .691 ± .170 | .675 ± .108 | .787 ± .334 | .867 ± .267 | .732 |
| FedProx | .715 | .668 | .667 | .667 | .791 | .867 | .729 |
| FedAdam, FedYogi | .849 ± .022 | .655 ± .044 | .881 ± .037 | .604 ± .106 | .902 ± .029 | 1.000 | .815 |

With one event (Canada) a C-index is the rank of one patient among the others, and each region is a sixth of the mean. arXiv 2606.23871 (22 June 2026) compares on the same data
set, and says that federated learning "consistently outperforms local training", and that FedAvg and FedProx are "stronger and more stable than FedAdam". In FLamby's table FedAdam is
ahead of both, and each region's own model is ahead of FedAvg in the West and in Europe. FLamby's table rests on one split
with 32 test events in all, and its spreads are over training seeds, not over patients: other patients could reverse its order. Polyfed's intervals above, with all 1,088 patients
tested, do not decide the first claim: the gains of FedAvg, FedProx and FedAdam (`fedopt`) over training alone may be on either side of 0. They say nothing of the second, since
methods are compared with training alone and not with one another."""  # noqa: E501
TABLES = {"heart-flamby": HEART, "brca": BRCA}
"""Federation -> a table in Markdown, below polyfed's own."""
