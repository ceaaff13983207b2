# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Train and evaluate a DLRM
#
# **Goal**: follow one batch through the model, train it, and judge the result by four numbers: AUC,
# log loss, normalized entropy, calibration. **Before**: Python, a little PyTorch. **Time**: about one
# minute to run on two CPU cores; no GPU, no download.
#
# We train on synthetic data whose truth is *planted*: we know the probability of every click, so we
# know the best score that any model can reach.

# %%
import dlrm  # before torch: it bounds how long threads spin, see "On a busy machine" in the README

dlrm.__version__

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from dlrm.config import DLRMConfig
from dlrm.datasets.reader import Reader
from dlrm.datasets.synthetic import synthetic_for
from dlrm.model import DLRM

torch.manual_seed(0)
data = synthetic_for(rows=(200, 300, 50, 1000), dense_in=5, n_train=100_000, seed=1)
data.table_names, data.dense_names, data.rows

# %% [markdown]
# ## One batch
#
# A sample has *dense* features (numbers) and *bags* of ids, one bag per embedding table. All ids of a
# batch lie in one array, table after table; `offsets[f, b]` says where the bag of sample `b` starts.

# %%
batch = next(iter(Reader.of(data, "train", batch_size=4)))
print("dense  ", tuple(batch.dense.shape))
print("ids    ", batch.ids.tolist())
print("offsets", batch.offsets.tolist())
print("bag of table 2, sample 3:", batch.bag(2, 3).tolist(), " label:", batch.label.tolist())

# %% [markdown]
# ## The model, step by step
#
# `dlrm/model.py` does the following, and nothing else. We do it by hand, and check.

# %%
config = DLRMConfig(rows=data.rows, dense_in=5, dim=8, bottom=(16,), top=(32,))
model = DLRM(config)
dense, ids, offsets, _ = batch.inputs()

x = model.bottom(dense)  # (4, 8): what the dense features say
bags = [table(ids[f], offsets[f]) for f, table in enumerate(model.tables)]  # 4 times (4, 8)
features = torch.stack([x, *bags], dim=1)  # (4, 5, 8)
products = features @ features.transpose(1, 2)  # (4, 5, 5): every feature with every other
i, j = torch.tril_indices(5, 5, -1)
top_in = torch.cat([x, products[:, i, j]], dim=1)  # (4, 8 + 10)
logit = model.top(top_in).squeeze(1)  # (4,)
torch.testing.assert_close(logit, model(dense, ids, offsets))
logit.sigmoid()

# %% [markdown]
# ## Train
#
# The command line and this function are the same thing: `python -m dlrm.train --data synthetic …`.
# A step of the loop is forward, backward, and two optimizers: one for the MLPs, and one that touches
# only the rows of the tables that the batch looked up.

# %%
from dlrm.train import make_config, show, train

folder = Path(tempfile.mkdtemp())
settings = {"data": "synthetic", "dim": 8, "batch_size": 256, "quiet": True}
run = make_config("tiny", out=str(folder / "run"), epochs=2, eval_every=200, **settings)
summary = train(run, data)
print(show(summary))

# %% [markdown]
# The curve of the loss, and of the validation. The dashed line is the loss that the planted truth has
# on the very rows of the validation: no model can go below it, except by luck. In the second
# epoch, from step 391 on, the blue line sinks below the orange one: those rows it has seen before.

# %%
import json

log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
steps = [e for e in log if e["event"] == "step"]
vals = [e for e in log if e["event"] == "val"]
smooth = np.convolve([e["loss"] for e in steps], np.ones(50) / 50, mode="valid")
plt.figure(figsize=(6, 3))
plt.plot(np.arange(len(smooth)) + 50, smooth, label="training (mean of 50 steps)")
plt.plot([e["step"] for e in vals], [e["logloss"] for e in vals], "o-", label="validation")
truth = data.truth.bayes("val")["realised_logloss"]
plt.axhline(truth, color="0.5", linestyle="--", label="planted truth")
plt.xlabel("step")
plt.ylabel("log loss")
plt.legend()
plt.show()

# %% [markdown]
# ## Four numbers, and how sure we are
#
# * **AUC**: the probability that a random click gets a higher score than a random non-click.
# * **Log loss**: what training minimises.
# * **Normalized entropy** (He et al. 2014): log loss over that of always predicting the average. One
#   means that nothing was learned.
# * **Calibration**: predicted clicks over real clicks. One is right; AUC does not see it.
#
# A test set is a sample, so each number has an interval (bootstrap).

# %%
from dlrm.bootstrap import intervals
from dlrm.checkpoint import load_model
from dlrm.metrics import scores
from dlrm.plots import reliability_bins
from dlrm.scoring import score_split

best, state = load_model(folder / "run")
label, score = score_split(best, data, "test")
print(scores(label, score))
for name, (low, high) in intervals(label, score).items():
    print(f"{name:<12} 95% between {low:.4f} and {high:.4f}")

# %%
predicted, observed, rows = reliability_bins(label, score)
plt.figure(figsize=(3.5, 3.5))
plt.plot([0, 1], [0, 1], "--", color="0.6")
plt.plot(predicted, observed, "o-")
plt.xlabel("predicted probability")
plt.ylabel("observed rate")
plt.show()

# %% [markdown]
# ## What goes wrong, and how to see it
#
# A learning rate that is far too high: the loss becomes NaN, and the run stops and says where and why.

# %%
from dlrm.diagnose import TrainingDiverged

try:
    wild = make_config(
        "tiny", out=str(folder / "wild"), dense_optimizer="sgd", dense_lr=1e12, **settings
    )
    train(wild, data)
except TrainingDiverged as error:
    print(error)

# %% [markdown]
# ## Try it
#
# 1. Take the interaction away (`interaction="cat"`): how much AUC do the planted pairs bring?
# 2. Halve the data. Which moves more, the AUC or its interval?
# 3. Multiply all logits by two (`scores(label, 2 * score)`). Which of the four numbers change, and why
#    does the AUC not?
#
# <details><summary>What to expect (another seed gives slightly other figures)</summary>
#
# 1. The AUC falls by about 0.008, from 0.770 to 0.762: a top MLP on concatenated vectors has to find
#    the products by itself. Add `interaction="cat"` to `settings`, and train in a new `out`.
# 2. Half the rows cost about 0.008 of AUC too. The test split is halved with them, so the interval
#    grows by √2, from 0.021 to 0.029 in width: on 5,000 rows the loss is hardly more than the noise.
# 3. AUC sees the order only, and that stays. Log loss and NE get worse (NE from 0.84 to 1.00: no
#    better than the average!), and calibration falls from 1.05 to 0.76: the model is too sure.
#
# </details>
