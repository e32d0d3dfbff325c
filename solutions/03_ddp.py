# %% [markdown]
# # 3. Distributed data parallel
#
# Chapter 3 of the course.

# %% tags=["nbval-ignore-output"]
from course_utils import hardware

hardware.report()

# %% [markdown]
# ## 1. The factory: equal factories and no head office

# %% [markdown]
# ## 2. The smallest real run: processes that add their gradients

# %% [markdown]
# ## 3. Predict, then measure: how many bytes every collective moves

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters on 1, 2 and 4 ranks

# %% [markdown]
# ## 5. Break it: ten ways to train the wrong model

# %% [markdown]
# ## 6. Exercises: write the parts of DDP yourself

# %% [markdown]
# <!-- exercises begin: this section is written by the EX03 engineer -->

# %% [markdown]
# <!-- exercises end -->

# %% [markdown]
# ## 7. See it: when communication hides behind the backward pass

# %% [markdown]
# ## 8. On a cluster: the same script under torchrun

# %% [markdown]
# ## 9. Remember
