"""scikit-learn's probe: a logistic regression on the pooled features of the frozen backbone."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from torch import Tensor, nn


def probe(net: nn.Module, head: str, x: Tensor, y: Tensor) -> nn.Module:
    """Fit a linear head on the features; C is chosen by three-fold cross-validation."""
    net.set_submodule(head, nn.Identity())
    with torch.no_grad():
        features = torch.cat([net(part) for part in x.split(100)]).numpy()
    grid = {"C": np.logspace(-3, 1, 5)}
    search = GridSearchCV(LogisticRegression(max_iter=1000), grid, cv=3)
    found = search.fit(features, y.numpy()).best_estimator_
    weight, bias = (torch.tensor(v, dtype=torch.float32) for v in (found.coef_, found.intercept_))
    if len(weight) == 1:  # two classes share one row
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    linear = nn.Linear(features.shape[1], len(weight))
    linear.weight.data, linear.bias.data = weight, bias
    net.set_submodule(head, linear)
    return linear
