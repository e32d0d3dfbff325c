# %% [markdown]
# # 7. Hybrid: several dimensions at once

# %% tags=["nbval-ignore-output"]
from torch import Tensor, nn

from course_utils import hardware
from course_utils.checks import check, hint

hardware.report()

# %% [markdown]
# ## 1. The factory: rows, columns and buildings

# %% [markdown]
# ## 2. The smallest real run: four ranks, two dimensions

# %% [markdown]
# ## 3. Predict, then measure: which call in which group

# %% [markdown]
# ## 4. By hand, then with PyTorch: two dimensions, then three

# %% [markdown]
# ## 5. Break it

# %% [markdown]
# ## 6. Exercises

# %% [markdown]
# ## 7. See it: the grid of ranks

# %% [markdown]
# ## 8. On a cluster: the same model under torchrun

# %% [markdown]
# ## 9. Remember
