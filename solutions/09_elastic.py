# %% [markdown]
# # 9. Elastic training: machines fail, the training goes on
#
# A training run on many machines loses some of them while it runs.

# %% tags=["nbval-ignore-output"]
from course_utils import hardware
from course_utils.checks import check, hint

hardware.report()

# %% [markdown]
# ## 1. The factory: the night shift

# %% [markdown]
# ## 2. The smallest real run

# %% [markdown]
# ## 3. Predict, then measure

# %% [markdown]
# ## 4. By hand, then with PyTorch

# %% [markdown]
# ## 5. Break it

# %% [markdown]
# ## 6. Exercises

# %% [markdown]
# ## 7. See it

# %% [markdown]
# ## 8. On a cluster

# %% [markdown]
# ## 9. Remember
