# %% [markdown]
# # Quick reference
#
# What the course explains, in tables: which parallelism when, the formulas, the messages and what to do, the words.
# Each row names the chapter that derives, measures or explains it: 03: 3 is section 3 of chapter 3, and 03 further: 4
# section 4 of the notebook that goes beyond it.

# %% [markdown]
# ## Which parallelism when

# %%
import matplotlib.pyplot as plt

from course_planner.figures.decision import decision_guide

decision_guide()
plt.show()

# %% [markdown]
# *Ask from top to bottom; the two questions between the lines stand beside the others. Pink is what a rank holds of
# the model: all of it, a piece of every layer, a part of every layer's columns, some layers, or all but some experts.*
#
# FSDP's gathers are hidden where each rank has enough tokens, on H100s in several machines about 2,500 (08: 4,
# *Prefetch*). More ranks then need a larger global batch, which has a limit (03 further: 4, *Batch size and learning
# rate*). Where it is reached, cut layers.
#
# | what | a rank holds, of the model states | a rank sends in a step | what it cannot do | in numbers | chapter |
# |---|---|---|---|---|---|
# | one process | all: 16 bytes a parameter | nothing | | 7.5 billion parameters: 120 GB | [00](00_start_here.ipynb) |
# | data parallel (DDP) | all | the gradients, nearly twice | save memory | a ring of 64 ranks sends 1.97 times the gradients, whatever the batch | [03](03_ddp.ipynb) |
# | ZeRO-1 and 2 | the parameters, a piece of the rest | as data parallel | get below 2 bytes a parameter | 120 GB become 31.41 and 16.64 on 64 ranks | [08](08_fsdp.ipynb) |
# | ZeRO-3, FSDP | a piece of everything, and the unit in work | half as much again | shrink activations, or give work to more ranks than there are samples | 120 GB become 1.88 on 64 ranks | [08](08_fsdp.ipynb) |
# | tensor parallel | a part of every layer | activations, four times a block | hide its messages: each layer waits for them | 145.6 billion parameters on 1,536 GPUs: 338.2 GB a step | [06](06_tensor_parallel.ipynb), [07](07_hybrid.ipynb) |
# | context parallel | all; of the activations those of its own tokens | keys and values (by heads queries and outputs too), in every layer; gradients as data parallel | shrink the model states | four ranks of chapter 10, a layer forward: 49152 bytes in a ring or an all-gather, 24576 by heads | [10](10_long_context.ipynb) |
# | pipeline | some layers | activations and their gradients, at each cut | be without a bubble unless F, B and W take equally long (ZB-V), or gain anything with one micro-batch | the same model: 9.7 GB a step; 4 stages, 8 micro-batches: a bubble of 0.375 | [05](05_pipeline.ipynb), [07](07_hybrid.ipynb) |
# | hybrid | its part of its stage | all three, each in its own group | forgive a wrong group: the shapes fit, the numbers do not | the same model, data dimension: 8.7 GB a step | [07](07_hybrid.ipynb) |
# | experts | all but the experts, and some of these | tokens to their experts and back, four times a layer; gradients as data parallel, an expert's over its copies | keep its load even, or know beforehand how much it sends | Mixtral 8x7B: 47 billion parameters, of which a token meets 13 | [11](11_experts.ipynb) |
# | elastic | the same, and a checkpoint on the disk | the same | make a failure cost nothing | 16,384 GPUs: a failure every 3.1 hours | [09](09_elastic.ipynb) |
#
# For a model and GPUs of your own, `python -m course_utils plan` tries all of them but the first and the last
# (chapter 12), or answers for a layout that you give it; `python -m course_utils trace --help` runs your program as
# one rank of thousands, or as several, and says whether their calls match.
#
# Activations too large? First recompute: a third more computing; nothing more is sent unless layers are cut (08
# further: 4).
#
# Cutting a model without micro-batches (chapter 4) saves memory but no time: with p stages, each is idle for
# 1 - 1/p of the time. The `nn.DataParallel` of chapter 2 is here for old code only.

# %% [markdown]
# ## Formulas
#
# Written in Python, so that you can paste them. The letters:
#
# | letter | meaning | letter | meaning |
# |---|---|---|---|
# | `n` | ranks that take part | `P` | parameters of the model |
# | `d, p, t` | ranks along data, pipeline, tensor | `L`, `W`, `H` | blocks, their width, their heads |
# | `b` | bytes of a number (4 or 2) | `V`, `C` | rows of the vocabulary, of the position table |
# | `S` | bytes of a tensor | `T`, `s` | tokens of the batch, of one sequence |
# | `N` | rows of the batch | `m`, `v` | micro-batches, chunks on a rank |
#
# ### Bytes that a rank sends
#
# | what | bytes | where | source |
# |---|---|---|---|
# | all-reduce, on a ring | `2 * S * (n - 1) / n` | 03: 3, *All-reduce on a ring* | [Patarasuk, Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002) |
# | reduce-scatter, or all-gather of a result of S, on a ring | `S * (n - 1) / n` | 06: 3, *What a ring carries* | [Thakur, Rabenseifner, Gropp 2005](https://doi.org/10.1177/1094342005051521) |
# | all-reduce on a star: rank 0 | `S * (n - 1)` | 03: 3, *All-reduce through rank 0* | counted there |
# | hierarchical all-reduce, k machines of g ranks: inside | `2 * S * (g - 1) / g` | 07 further: 3, *two kinds of links* | counted there |
# | the same, between machines | `2 * (S / g) * (k - 1) / k` | 07 further: 3, *two kinds of links* | counted there |
# | `nn.DataParallel`: parameters out, gradients back | `2 * P * b * (n - 1)` | 02: 3, *Predict* | counted there |
# | DDP, handed over in a step | `P * b` | 03: 3, *What DDP hands over* | counted there |
# | ZeRO-1 and ZeRO-2, on a ring | `2 * P * b * (n - 1) / n` | 08: 3, *What a ring carries* | [Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054), section 7 |
# | ZeRO-3, on a ring | `3 * P * b * (n - 1) / n` | 08: 3, *What a ring carries* | the same |
# | gathers of a layer by ZeRO-3 in a stage under 1F1B, in number | `m + 1` | 12: 3, *How often does a stage gather* | traced there |
# | a cut, h values a row: each direction | `N * h * b` | 04: 3, *What crosses the cut* | counted there |
# | tensor parallel: a block, on a ring | `8 * T * W * b * (t - 1) / t` | 06: 4, *A whole block* | [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), 3.2 |
# | hybrid: tensor group | `8 * (L / p) * (T / d) * W * b * (t - 1) / t` | 07: 3, *What each dimension sends* | the same |
# | hybrid: pipeline group, a stage in the middle | `2 * (T / d) * W * b` | 07: 3, *What each dimension sends* | the same |
# | hybrid: data group | `2 * P / (p * t) * b * (d - 1) / d` | 07: 3, *What each dimension sends* | the same |
# | ring attention, S of keys on a rank: forward | `2 * S * (n - 1)` | 10: 3, *What leaves a rank, and what it holds* | [Liu et al. 2023](https://arxiv.org/abs/2310.01889), counted there |
# | ring attention: backward | `4 * S * (n - 1)` | 10: 4, *Backward* | counted there |
# | attention by heads (Ulysses): each direction | `4 * S * (n - 1) / n` | 10: 3, *What leaves a rank, and what it holds* | [Jacobs et al. 2023](https://arxiv.org/abs/2309.14509), section 3 |
# | experts: a layer in a step, all n ranks together, k experts a token | `4 * k * T * W * b` | 11: 4, *The whole model on several ranks* | counted there |
#
# ### Bytes and numbers that a rank holds
#
# | what | how many | where | source |
# |---|---|---|---|
# | model states with Adam: whole, in bytes | `16 * P` | 08: 3, *Five entries* | Rajbhandari et al. 2019, 3.1 |
# | ZeRO-1, in bytes | `4 * P + 12 * P / n` | 08: 3, *Five entries* | the same, section 5 |
# | ZeRO-2, in bytes | `2 * P + 14 * P / n` | 08: 3, *Five entries* | the same |
# | ZeRO-3, in bytes | `16 * P / n` | 08: 3, *Five entries* | the same |
# | FSDP, most parameters at once: blocks of U, the root unit of R | `P / n + R + U` | 08: 4, *What a wrapping costs* | [Zhao et al. 2023](https://arxiv.org/abs/2304.11277) |
# | parameters of a block | `12 * W**2 + 13 * W` | 06: 4, *A whole block* | counted there |
# | parameters of a language model | `L * (12 * W**2 + 13 * W) + (2 * V + C + 2) * W` | 04 further: 3, *The planned model* | counted there |
# | parameters of a block on t ranks | `(12 * W**2 + 7 * W) / t + 6 * W` | 06: 4, *A whole block* | counted there |
# | parameters of E experts, their router and a shared expert | `W * E + (E + 1) * (8 * W**2 + 5 * W)` | 11: 4, *One process* | its class `MoE` |
# | places in the queue of an expert, factor f, k of E for a token | `ceil(f * T * k / E)` | 11 further: 3, *what a capacity drops* | [Fedus et al. 2021](https://arxiv.org/abs/2101.03961), 2.2 |
# | activations of a block of the course, in bytes | `4 * T * (16 * W + 4 + H)` | 04 further: 3, *What autograd keeps* | counted there |
# | activations of a block with dropout, 16 bits, in bytes | `T * W * (34 + 5 * H * s / W)` | 01: 5, *Decide* | [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), equation 1 |
# | the same on t ranks, scores computed again, sequence shared out | `34 * T * W / t` | 12: 3, *one rank of 1,024* | the same, table 2 |
# | activations kept of a block that is recomputed, in bytes | `T * W * b` | 08 further: 4, *Activation checkpointing* | [Chen et al. 2016](https://arxiv.org/abs/1604.06174) |
# | largest scores of attention in a ring, in bytes | `4 * N * H * (s / (2 * n))**2` | 10: 3, *The scores* | counted there |
# | micro-batches in flight, GPipe | `m` | 05: 3, *The shelf* | counted there |
# | micro-batches in flight on rank r, 1F1B | `min(m, p - r)` | 05: 3, *The shelf* | counted there |
# | passes through half a stage in flight, ZB-V | `2 * p` | 05 further: 3, *A V* | Qi et al. 2024, section 6 |
# | first GPU of `nn.DataParallel`, in bytes | `b * (3 * P + I * N + A * ceil(N / n) + 4 * O * N)` | 02: 4, *Why the first GPU* | counted there |
#
# I, A and O are the numbers of the inputs, the activations and the outputs of one row.
#
# ### Time
#
# | what | formula | where | source |
# |---|---|---|---|
# | idle share of a cut model, one batch | `1 - 1 / p` | 04: 3, *Who waits* | derived there |
# | bubble of a pipeline, of the ideal time | `(p - 1) / m` | 05: 3, *The bubble* | Narayanan et al. 2021, 2.2.1 |
# | the same, of the total time | `(p - 1) / (m + p - 1)` | 05: 3, *The bubble* | [Huang et al. 2019](https://arxiv.org/abs/1811.06965), 2.3 |
# | interleaved, of the ideal time | `(p - 1) / (v * m)` | 05 further: 3, *Interleaved* | Narayanan et al. 2021, 2.2.2 |
# | ZB-H1, idle time of a step | `(p - 1) * (tF + tB - tW)` | 05 further: 3, *Zero bubble* | [Qi et al. 2024](https://arxiv.org/abs/2401.10241), table 2 |
# | ZB-H2, idle time of a step | `(p - 1) * (tF + tB - 2 * tW)` | 05 further: 3, *Zero bubble* | the same |
# | DualPipe-V, idle time of a step, tF = tB >= tW | `(p - 1) * (tF + tB - tW) / 2` | 05 further: 3, *A V* | simulated there |
# | m batches forward through stages | `sum(times) + (m - 1) * max(times)` | 04: 3, *What an unbalanced cut costs* | simulated there |
# | one all-reduce on a ring, start-up a in each step | `2 * (n - 1) * (a + S / n / speed)` | 03: 7, *See it* | a model |
# | one all-gather on a ring, start-up a in each round | `(n - 1) * (a + S / n / speed)` | 12: 4, *How long a step takes* | [Hockney 1994](https://doi.org/10.1016/S0167-8191%2806%2980021-9) |
# | exposed of k buckets, each r, backward takes E | `r + (k - 1) * max(0, r - E / k)` | 03: 7, *See it* | a model |
# | operations of a training step | `6 * P * T` | 01: 5, *Decide* | [Kaplan et al. 2020](https://arxiv.org/abs/2001.08361), 2.1 |
# | the same of one token, with attention | `6 * P + 12 * L * s * W` | 12: 5, *Break it* | [Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), appendix B |
# | operations of a block, forward | `24 * T * W**2 + 4 * T * s * W` | 06: 7, *See it* | Narayanan et al. 2021, appendix |
#
# ### Places, losses and failures
#
# | what | formula | where | source |
# |---|---|---|---|
# | rank at the place i, j, k of a grid d x p x t | `(i * p + j) * t + k` | 07: 3, *Ranks as coordinates* | derived there |
# | ways to cut l stations into p stages | `comb(l - 1, p - 1)` | 04: 4, *Where to cut* | derived there |
# | loss of a batch, from chunks of (rows, mean loss) | `sum(rows * loss for rows, loss in chunks) / N` | 02: 3, *Predict* | derived there |
# | steps done twice: death after D, saved every k | `D % k` | 09: 3, *How often to save* | counted there |
# | mean time between failures of a job | `node_mtbf / nodes` | 09: 3, *How often to save* | derived there |
# | share lost: saving takes c, recovery r, every x | `c / x + (x / 2 + r) / M` | 09: 3, *How often to save* | Young 1974 |
# | best interval between checkpoints | `sqrt(2 * c * M)` | 09: 3, *How often to save* | Young 1974 |
#
# Two rules of thumb: k times the batch, k times the learning rate (03 further: 4, *Batch size and learning rate*), and four
# micro-batches a stage keep the bubble at a fifth of the time (05: 3, *Two percentages*).

# %% [markdown]
# ### Your own numbers
#
# Change the first two lines.

# %%
P, n, b = 7.5e9, 64, 2  # parameters, ranks, bytes of a number that travels
L, W, T, t = 32, 4096, 4096, 8  # blocks, width, tokens of a step, ranks of a tensor group

held = {0: 16 * P, 1: 4 * P + 12 * P / n, 2: 2 * P + 14 * P / n, 3: 16 * P / n}
for stage, states in held.items():
    sent = (3 if stage == 3 else 2) * P * b * (n - 1) / n
    print(f"ZeRO-{stage}: holds {states / 1e9:6.2f} GB, sends {sent / 1e9:5.2f} GB a step")
tensor = L * 8 * T * W * b * (t - 1) / t
print(f"tensor parallel on {t} ranks: sends {tensor / 1e9:.2f} GB a step")

# %% [markdown]
# ## Messages, and what to do
#
# Read a message from its first line: it names the rank that failed first, and your own line. What it says about
# other ranks is usually a consequence.
#
# ### From `launch`
#
# | it says | what happened | what to do | where |
# |---|---|---|---|
# | *raised* ... *Meanwhile* | your code raised in that rank | repair the line that is quoted; the other ranks were fine | 00: 5 |
# | *a rank waits for a call that no other rank will make.* ... *finished without calling it* | a collective that not all ranks call: under `if rank == 0`, after a `return`, in a loop that is longer on one rank | call it on all ranks, as often on each, in the same order | 00: 5 |
# | *finished without sending it*, or *finished without receiving it* | a `recv` without a `send`, or the other way round; often a wrong rank number | pair them: who sends to whom, how often | 01: 5 |
# | *waits in* ... *to rank* on both sides | both send first, or both receive first | let one of them begin with the other call | 05: 5 |
# | *waits in* `new_group` | `new_group` was not called by all ranks in the same order | every rank creates every group, also those that it is not in | 07 further: 5 |
# | *waits in* ... *of backward* | a rank with DDP has fewer batches | the same number on each rank, or `Join` | 03 further: 4 |
# | *the ranks' calls do not match.* | at one meeting the ranks called different things, or brought tensors of different shape or data type | compare the quoted lines; look for a last batch that is smaller | 04: 5 |
# | *a call lacks its partner, and no rank has waited for it.* | the same, with `async_op=True`, `isend` or `irecv`: nothing stopped, and the result may be wrong | make the call on the other rank as well, and wait for both | |
# | *finished without setting it* | a rank waits for a key of the store that nobody has set | set it on another rank, under the same name | |
# | *still waited when the time was up*, or *It is not proven that none can go on* | the ranks wait, and a thread of one might still have acted | as in the rows above | |
# | *called destroy\_process\_group while other ranks still communicated* | a rank was done before the others, or left out a call | call it last on all ranks; look at the line in which the others waited | |
# | *was running* ... *when the time was up (timeout=* | an endless loop, or work that takes longer than the limit | look at the quoted line; if it only needs longer, `launch(..., timeout=300)` | |
# | *was stopped* ... *when the time was up* | something stopped the process from outside | run the cell again | |
# | *before it returned.* | the rank left with `sys.exit` or `os._exit` | return instead | |
# | *was killed by* `SIGKILL`: *ended from outside; the system does this when memory runs out* | usually too little memory | fewer ranks, smaller batches | 09: 2 |
# | *was killed by* `SIGSEGV`: *it used memory that is not its own*; `SIGABRT`: *a library gave up* | an error in C code, often a shape or a type that a library does not check | read what it printed above | |
# | *lost its connection in* | another rank was gone: a consequence | look at the rank that is named first | |
# | *cannot be pickled, so it cannot be sent to the ranks.* | the function uses a lock, an open file, a generator | create it inside of the function, on each rank | |
# | *returned what cannot be pickled:* | the same, on the way back | return tensors, numbers, lists, dicts | |
# | *launch was called inside a rank* | ranks inside ranks | one `launch` for all ranks, groups inside by `dist.new_group` | |
# | *nprocs is the number of ranks*, or *fn is a function that every rank calls with its number* | the arguments are in another order, or the function was called | `launch(fn, 2)`, without brackets after `fn` | |
# | *launch cannot write to the temporary folder* | the disk is full | free some space, or set `TMPDIR` | |
#
# ### From `check` and the progress
#
# | it says | what it means |
# |---|---|
# | *not attempted yet* | the line `raise NotImplementedError` is still there, or the cell was not run |
# | *a part that this needs is not written yet* | a method of your class still raises it |
# | *(not looked at yet)* | an earlier requirement failed, and this one would only repeat it, or wait for the same hang |
# | *expected:*, *got:*, *likely:* | what was required, what came, the mistake that gives exactly this |
# | *the same in* 4 more requirements | one mistake, told once: repair it first |
# | *still running after* | the answer takes too long: an endless loop, or far too much work |
# | *must be a function, and you passed* | you passed a call or a value: `check("3.1", average_gradients)`, without brackets |
# | *is called as* | your function has other parameters than the stub |
# | *the check could not use what your answer gave* | a wrong type or shape: look at what the description says under "Returns" |
# | *There is no exercise* | a slip in the id; the sentence names those of the chapter |
# | *Your progress file was damaged or changed by hand.* | what can be read is kept; the old file lies beside it |
# | *holds no progress that can be read* | the file is not one that `export_progress` wrote |
# | *another kernel holds* | two kernels write at once, or one died; run the cell again after ten seconds |
#
# Your progress is one small file on your machine. These calls are in `course_exercises`, and `python -m course_utils
# progress --help` says how to do the same in a terminal. None of them touches your answers, and each keeps what was
# there before in a file.
#
# | call | what it does |
# |---|---|
# | `reset("3.1")`, `reset(3)`, `reset("all")` | forgets that you passed an exercise, a chapter, all |
# | `export_progress("mine.json")` | writes your progress into one file, to take to another machine |
# | `import_progress("mine.json")` | adds the progress in such a file to the one here |
#
# ### From PyTorch and Python
#
# | it says | why, in this course | where |
# |---|---|---|
# | *Expected more than 1 value per channel when training* | a chunk or micro-batch of one row meets batch normalisation | |
# | *is not on the expected device* | model and data are on different devices; move both, the targets too | 02: 5 |
# | *Error(s) in loading state_dict*, keys with `module.` | the checkpoint is of the wrapper: save `model.module.state_dict()` | 02: 5 |
# | *Cannot re-initialize CUDA in forked subprocess* | a cell had used the GPU, and ranks were forked from the notebook's process, as Accelerate's `notebook_launcher` does. Restart the kernel and touch no GPU before, or call `launch(fn, 2)`, whose ranks do not come from the kernel | |
# | *CUDA has been initialized before the* `notebook_launcher` *could create a forked subprocess* | the same, said beforehand: an import, a `.cuda()` or an `Accelerator()` in a cell. On Kaggle's two T4, `launch(fn, 2)` gives each rank one of them; take float16, since a T4 has no bfloat16 | |
# | *process 0 terminated with exit code 1* | `mp.spawn` cannot say more: the reason is in the terminal | 03: 4 |
# | *Can't get attribute* | `mp.spawn` pickles a function of a notebook by its name: put it into a file | 03: 4 |
# | *Expected to have finished reduction in the prior iteration* | a parameter got no gradient: use it, or `find_unused_parameters=True` | 03 further: 5 |
# | *cannot assign module before Module.\_\_init\_\_() call* | `super().__init__()` is missing | 04 further: 6 |
# | *takes 1 positional argument but 2 were given* | `forward` without `self`, or a style of a plan called as a layer | 04 further: 6, 06 further: 5 |
# | *mat1 and mat2 shapes cannot be multiplied* | a `flatten` is missing between convolutions and a linear layer | 04 further: 6 |
# | *is invalid for input of size* | heads that do not divide by the ranks | 06: 4 |
# | *is not part of group* | `src` and `dst` are global ranks: inside a group use `group_src` and `group_dst` | 07: 5 |
# | *PytorchStreamReader failed reading zip archive* | a checkpoint that was torn: write to a new file, then rename | |
# | *EADDRINUSE* | a process of an earlier run holds the port: end it, or let the system choose the port | 09 further: 5 |
# | *does not have a sharding strategy registered* | context parallelism on the CPU: its attention has no rule for a cut sequence | 10: 4 |
# | *Watchdog caught collective operation timeout* | with NCCL, a collective has waited for its limit. The rank that prints it is the one that waited: compare `SeqNum` and `OpType` of all ranks, and look for the rank whose last one is the smallest (flight recorder) | |
# | *Some NCCL operations have failed or timed out* | follows the line above: look for the first one | |
# | *CUDA out of memory* | activations or a unit are too large: smaller micro-batches, recomputation, shards. Or another process holds the GPU | |
# | *The client socket has timed out after* | the store is not reached: a wrong address or port, a firewall, or rank 0 (under torchrun its agent) has not begun | |
# | *The connection to the C10d store has failed* | the agents do not reach `--rdzv-endpoint`: the same endpoint and `--rdzv-id` on each, and its host up | |
#
# ### No message, but slow
#
# | what one sees | why, and what to do | where |
# |---|---|---|
# | DDP slower than one GPU | the batch was divided as well, so that each GPU computes too little to hide the gradients. Keep the batch of each GPU, or accumulate with `no_sync` | 03 further: 3 |
# | all GPUs wait, and none for messages | the ranks share the CPUs: fewer `num_workers` and threads (`OMP_NUM_THREADS`) for each. `python -m course_utils doctor` says what idles | |
# | one rank keeps the others waiting | look at a profile of all ranks: who waits least in its collectives is the slow one | 03 further: 4 |
# | the same node is slower with torchrun than by hand | processes run on CPUs far from their GPU: `torchrun --numa-binding node` binds them (PyTorch 2.11 has it) | |
# | `dist.reduce(loss, 0)`, then a rank waits for ever | only rank 0 has the sum, the others keep their own number, and decide by it. Use `all_reduce` before an `if` | 03: 3 |
#
# An agent of torchrun that waits and says nothing waits for the minimum of `--nnodes`, up to its `join_timeout` (600 s).

# %% [markdown]
# ## Glossary
#
# Each word stands in bold in the chapter that explains it. The factory's words are in the table of
# [01](01_factory.ipynb), section 1; what a chapter adds is in the table of its own section 1.
#
# | word | meaning | chapter |
# |---|---|---|
# | 1F1B | a schedule: as soon as a gradient can come back, a rank runs one backward pass after each forward pass | [05](05_pipeline.ipynb) |
# | accuracy | the share of images that get the right class | [02](02_data_parallel.ipynb) |
# | activation checkpointing | forward keeps the input of a block only; backward computes the rest of it again | [08](08_fsdp_further.ipynb) |
# | activations | the results of layers; those that backward needs again are kept until then | [01](01_factory.ipynb) |
# | agent | the process that `torchrun` is on each node: it starts the workers, watches them and restarts them | [09](09_elastic.ipynb) |
# | all-gather | a collective: every rank hands in a piece, and every rank gets all pieces | [03](03_ddp.ipynb) |
# | all-reduce | a collective: every rank hands in a tensor, and every rank gets the sum of all of them | [00](00_start_here.ipynb) |
# | all-to-all | a collective: every rank sends a piece to each rank, and gets one from each | [10](10_long_context.ipynb) |
# | alpha-beta | the model of a message's time: a latency, and its bytes over a bandwidth | [12](12_plan_a_cluster.ipynb) |
# | attention | a layer in which every token looks at others: a weighted mean of their values, by query and key | [04](04_manual_split.ipynb) |
# | B | in a zero-bubble schedule, the half of backward that computes the gradient of the inputs | [05](05_pipeline_further.ipynb) |
# | backend | the library that moves the bytes of a process group | [03](03_ddp.ipynb) |
# | balanced | cut so that all stages take equally long | [04](04_manual_split.ipynb) |
# | batch normalisation | a layer that uses mean and spread of the batch, so that a row's result depends on the other rows | [03](03_ddp_further.ipynb) |
# | batch sampler | what yields the lists of indices that make the batches of a `DataLoader` | [09](09_elastic.ipynb) |
# | block | an attention and an MLP with their norms: what a transformer repeats | [06](06_tensor_parallel.ipynb) |
# | broadcast | a collective: one rank's tensor goes to all | [03](03_ddp.ipynb) |
# | bubble | the time in which ranks of a pipeline wait for each other | [05](05_pipeline.ipynb) |
# | bucket | several gradients in one message | [03](03_ddp.ipynb) |
# | budget | of the capstone: the most that the tensors of a rank may take up at any moment | [13](13_capstone.ipynb) |
# | buffers | tensors of a module that are not trained, such as a running mean | [02](02_data_parallel.ipynb) |
# | capacity | how many pieces an expert takes in a step; later ones are dropped | [11](11_experts_further.ipynb) |
# | capacity factor | the capacity, as a multiple of what each expert gets if all are chosen alike | [11](11_experts_further.ipynb) |
# | causal mask | what keeps a token from looking at those that come later | [04](04_manual_split_further.ipynb) |
# | checkpoint | all that a run needs to go on, in files | [09](09_elastic.ipynb) |
# | chunk | a worker's share of the batch in `nn.DataParallel` | [02](02_data_parallel.ipynb) |
# | chunks | the pieces of the model that one rank holds in an interleaved pipeline | [05](05_pipeline_further.ipynb) |
# | collective | one operation that all ranks of a group call together | [00](00_start_here.ipynb) |
# | column cut | each rank has some columns of the matrix, needs the whole input and gets some columns of the output | [06](06_tensor_parallel.ipynb) |
# | combine | the way of experts' results back to the ranks of their tokens | [11](11_experts.ipynb) |
# | communication hook | a function that DDP calls for each full bucket in place of its own all-reduce | [03](03_ddp.ipynb) |
# | conjugate pair | two functions of which each is the other's backward: one sums in forward, one in backward | [06](06_tensor_parallel.ipynb) |
# | context parallelism | each rank has some tokens of every sequence, in every layer; only attention has to communicate | [10](10_long_context.ipynb) |
# | contiguous | with its numbers next to each other in memory, as collectives want them | [06](06_tensor_parallel.ipynb) |
# | CPU offload | shards that wait in the memory of the CPU | [08](08_fsdp.ipynb) |
# | CUDA_VISIBLE_DEVICES | the environment variable with the list of GPUs that a program may see | [02](02_data_parallel.ipynb) |
# | cut | the place where one stage ends and the next begins | [04](04_manual_split.ipynb) |
# | data parallelism | copies of the model share the batch and average their gradients | [01](01_factory.ipynb) |
# | default process group | the group of all ranks | [03](03_ddp.ipynb) |
# | device mesh | all ranks in a grid, with a name for each dimension | [07](07_hybrid.ipynb) |
# | dispatch | the way of tokens to the ranks of their experts, by all-to-all | [11](11_experts.ipynb) |
# | distributed data parallel | data parallelism with one process for each GPU, none of them in charge; DDP | [03](03_ddp.ipynb) |
# | DistributedSampler | what tells each rank which rows are its own | [03](03_ddp.ipynb) |
# | dropped | of a piece: without a place in the queue of its expert, which then adds nothing to the token | [11](11_experts_further.ipynb) |
# | DTensor | a tensor that knows on which mesh it lies and how it is cut | [06](06_tensor_parallel.ipynb) |
# | DualPipe-V | a schedule on a V that runs F of one chunk beside B of the other | [05](05_pipeline_further.ipynb) |
# | elastic | able to go on when ranks are lost or added | [09](09_elastic.ipynb) |
# | embedding | the table with a row for each word | [06](06_tensor_parallel.ipynb) |
# | epoch | one pass through all the data | [02](02_data_parallel.ipynb) |
# | error file | where a worker under torchrun leaves its exception, for its agent: `@record` | [09](09_elastic_further.ipynb) |
# | expert | one of several MLPs beside each other, of which a token goes through a few only | [11](11_experts.ipynb) |
# | expert parallelism | a mixture of experts with its experts on different ranks | [11](11_experts.ipynb) |
# | exposed | of communication: what is not hidden behind computing | [03](03_ddp.ipynb) |
# | fake process group | a backend in which a process is one rank of as many as it likes, and every collective is over at once | [12](12_plan_a_cluster.ipynb) |
# | fake tensor | a tensor with a shape and a type, and no numbers or memory | [12](12_plan_a_cluster.ipynb) |
# | flat | with all parameters of a unit laid end to end in one vector | [08](08_fsdp.ipynb) |
# | flight recorder | PyTorch's record of the last collectives of each rank, written when a time limit runs out | [09](09_elastic_further.ipynb) |
# | frozen | of a parameter: not trained | [03](03_ddp.ipynb) |
# | full | of recomputation: a layer keeps its input, and backward computes the rest again | [12](12_plan_a_cluster.ipynb) |
# | fully sharded data parallelism | data parallelism in which each rank holds a piece of everything; FSDP, ZeRO-3 | [08](08_fsdp.ipynb) |
# | fused kernel | one GPU program that computes attention tile by tile and never writes its scores to memory | [10](10_long_context.ipynb) |
# | Gantt chart | a picture with a lane for each rank and a box for each piece of work | [05](05_pipeline.ipynb) |
# | gather | pieces from all, put together in one place | [02](02_data_parallel.ipynb) |
# | global batch | all rows of one step, on all ranks together | [03](03_ddp.ipynb) |
# | global interpreter lock | the lock that lets one thread of a process at a time run Python code; GIL | [02](02_data_parallel.ipynb) |
# | gloo | the backend between CPUs | [03](03_ddp.ipynb) |
# | GPipe | a schedule: all forward passes, then all backward passes | [05](05_pipeline.ipynb) |
# | gradient accumulation | several backward passes before one update | [03](03_ddp_further.ipynb) |
# | gradient clipping | scaling all gradients down where their norm is too large | [06](06_tensor_parallel_further.ipynb) |
# | group normalisation | a layer that uses mean and spread of one row only | [05](05_pipeline_further.ipynb) |
# | grouped product | many matrices in one call, each times the rows of its own queue | [11](11_experts.ipynb) |
# | grouped-query attention | several heads of queries share one head of keys and values | [06](06_tensor_parallel.ipynb), [10](10_long_context.ipynb) |
# | handles | what `new_group` returns: the only way to speak to a group | [07](07_hybrid.ipynb) |
# | head | the last layer, which turns a token into a score for each word | [06](06_tensor_parallel.ipynb) |
# | heads | independent attentions beside each other, each on a part of the width | [04](04_manual_split.ipynb) |
# | heartbeat | a sign of life after every step | [09](09_elastic_further.ipynb) |
# | hierarchical all-reduce | a sum in three steps: inside each machine, between machines, inside again | [07](07_hybrid_further.ipynb) |
# | hook | a function that PyTorch calls by itself, when a module runs or a gradient arrives | [02](02_data_parallel.ipynb) |
# | hop latency | the time from the end of a pass until its result has reached the next rank | [05](05_pipeline.ipynb) |
# | HSDP | hybrid sharding: sharded inside a machine, replicated across machines | [08](08_fsdp_further.ipynb) |
# | idle share | the part of all ranks' time in which they do not compute | [01](01_factory.ipynb) |
# | in flight | of a micro-batch: after its forward and before its backward, so that its activations are kept | [05](05_pipeline.ipynb) |
# | interleaved | of a schedule: each rank has several pieces of the model, which makes the bubble smaller | [05](05_pipeline_further.ipynb) |
# | keep-alive | the sign by which an agent stays on the list | [09](09_elastic.ipynb) |
# | kernel | the process behind a notebook | [00](00_start_here.ipynb) |
# | keys | what the tokens offer, to be compared with a query | [04](04_manual_split.ipynb) |
# | last call | the time that a rendezvous waits for more nodes once there are enough | [09](09_elastic.ipynb) |
# | latency | the time from an order to its delivery | [01](01_factory.ipynb) |
# | linear scaling rule | k times the batch, k times the learning rate | [03](03_ddp_further.ipynb) |
# | load | the number of pieces that chose an expert | [11](11_experts.ipynb) |
# | logits | the scores before a softmax | [02](02_data_parallel.ipynb) |
# | logsumexp | the logarithm of a sum of exponentials: with it, partial results of a softmax can be merged | [10](10_long_context.ipynb) |
# | margin | how far a decision is from another one; small, it flips with the last digits | [11](11_experts.ipynb) |
# | master copy | the parameters in 32 bits, beside those in 16 | [08](08_fsdp.ipynb) |
# | maximum | the most nodes that a run takes | [09](09_elastic.ipynb) |
# | mean time between failures | how long it takes on average until something fails; MTBF | [09](09_elastic.ipynb) |
# | mesh | the grid of devices on which a DTensor lies | [06](06_tensor_parallel.ipynb) |
# | message | bytes that travel from one rank to another | [00](00_start_here.ipynb) |
# | meta device | a device on which tensors have a shape and no memory | [04](04_manual_split.ipynb) |
# | MFU | model FLOPs utilisation: the share of the peak that a run reaches, of the operations that the model needs | [12](12_plan_a_cluster.ipynb) |
# | micro-batch | a part of the batch that goes through a pipeline by itself | [01](01_factory.ipynb) |
# | minimum | the fewest nodes that a run starts or goes on with | [09](09_elastic.ipynb) |
# | mixed precision | computing in 16 bits, with a master copy in 32 | [08](08_fsdp.ipynb) |
# | mixture of experts | a layer with many MLPs, of which each token goes through k; MoE | [11](11_experts.ipynb) |
# | MLP | two matrices with a nonlinear function between them | [06](06_tensor_parallel.ipynb) |
# | model parallelism | one model, cut over several devices | [01](01_factory.ipynb) |
# | model states | parameters, gradients and optimizer state | [08](08_fsdp.ipynb) |
# | NCCL | the backend between NVIDIA GPUs | [03](03_ddp.ipynb) |
# | node | a machine, or what torchrun takes for one | [09](09_elastic.ipynb) |
# | op | one pass of one micro-batch through a stage: F3, B3 | [05](05_pipeline.ipynb) |
# | optimizer state | what the optimizer keeps for each parameter, such as Adam's two averages | [08](08_fsdp.ipynb) |
# | orphan | a worker that outlives its launcher and holds its port | [09](09_elastic_further.ipynb) |
# | overlaps | of communication: it goes on while the rank computes | [03](03_ddp.ipynb) |
# | owner | the rank that keeps a parameter's state and computes its update | [08](08_fsdp.ipynb) |
# | padding | what is added so that all get equally much: rows that come twice, zeros at the end | [03](03_ddp.ipynb) |
# | parallel forward | every replica computes the outputs of its chunk | [02](02_data_parallel.ipynb) |
# | partial | with the right shape and a part of the sum: the ranks' tensors have to be added up | [06](06_tensor_parallel.ipynb) |
# | payload | the bytes that a rank hands to a call | [03](03_ddp.ipynb) |
# | pickled by reference | sent as a name, which the receiver has to find for itself | [03](03_ddp.ipynb) |
# | piece | a token on its way to one of its experts: a pair (token, expert) | [11](11_experts.ipynb) |
# | placement | how a DTensor lies on a dimension of its mesh: `Shard(dim)`, `Replicate()` or `Partial()` | [06](06_tensor_parallel.ipynb) |
# | plan | what becomes of each layer, for `parallelize_module` | [06](06_tensor_parallel.ipynb) |
# | process group | ranks that communicate with each other | [03](03_ddp.ipynb) |
# | profile | what `torch.profiler` wrote: when each operator began and ended, in each thread | [03](03_ddp_further.ipynb) |
# | queries | what the tokens ask for: each is compared with the keys of the tokens that it may see | [10](10_long_context.ipynb) |
# | query | what a token looks for in the others | [04](04_manual_split.ipynb) |
# | rank | one process with its own memory and, where there is one, its own GPU; also its number | [00](00_start_here.ipynb) |
# | recomputation | computing activations a second time in place of keeping them | [05](05_pipeline_further.ipynb) |
# | recv | to receive a message: waits until it arrives | [01](01_factory.ipynb) |
# | reduce-scatter | a collective: the sum of all, of which every rank gets one piece | [03](03_ddp.ipynb) |
# | regret | the share by which the step of a chosen plan is longer than with the best one | [12](12_plan_a_cluster.ipynb) |
# | rendezvous | where processes find each other before they form a group | [03](03_ddp.ipynb) |
# | replica | a copy of the model for one step | [02](02_data_parallel.ipynb) |
# | replicate | to copy the model to all devices | [02](02_data_parallel.ipynb) |
# | replicated | whole and equal on every rank | [06](06_tensor_parallel.ipynb) |
# | reshard | to free what was gathered, so that only the rank's own shard stays | [08](08_fsdp.ipynb) |
# | resharding | loading a checkpoint on another number of ranks | [08](08_fsdp.ipynb) |
# | ring | every rank sends to the next only | [00](00_start_here.ipynb) |
# | ring attention | attention in which queries stay and keys and values go round all ranks, one hop at a time | [10](10_long_context.ipynb) |
# | roofline | the model of a kernel's time: its FLOPs or its bytes, whichever take longer | [12](12_plan_a_cluster.ipynb) |
# | root | the rank at the centre of a collective | [03](03_ddp.ipynb) |
# | router | the linear layer that scores all experts for each token | [11](11_experts.ipynb) |
# | row cut | each rank has some rows of the matrix, needs some columns of the input and gets a partial sum | [06](06_tensor_parallel.ipynb) |
# | safetensors | a file of tensors: the length of a header, the header in JSON, then the numbers | [08](08_fsdp_further.ipynb) |
# | scatter | to share out: each gets one piece | [02](02_data_parallel.ipynb) |
# | schedule | who works on what, in which order | [04](04_manual_split.ipynb) |
# | scores | products of a query with the keys, before the softmax | [10](10_long_context.ipynb) |
# | selective | of recomputation: attention's scores are computed again, and all else is kept | [12](12_plan_a_cluster.ipynb) |
# | selective activation checkpointing | some operations' results are kept for backward, all else is computed again | [08](08_fsdp_further.ipynb) |
# | send | to send a message: waits until the other side takes it | [01](01_factory.ipynb) |
# | sequence parallelism | activations cut by tokens where layers work on each token alone | [06](06_tensor_parallel.ipynb) |
# | shadows | of a rank that has finished: it answers the others' collectives with zeros | [03](03_ddp_further.ipynb) |
# | shard | a rank's piece of a tensor | [06](06_tensor_parallel.ipynb) |
# | sharded | cut, with one piece on each rank | [06](06_tensor_parallel.ipynb) |
# | shared expert | an expert that every token goes through, beside those that it chooses | [11](11_experts.ipynb) |
# | silently untied | of two uses of one matrix: they became two matrices, and nothing says so | [04](04_manual_split.ipynb) |
# | slot | the unit of time on a pipeline's picture | [05](05_pipeline.ipynb) |
# | split point | the name of a layer before which PyTorch cuts a model | [05](05_pipeline_further.ipynb) |
# | splits | how many rows go to each rank, and come from each, in an uneven all-to-all | [11](11_experts.ipynb) |
# | stage | the layers of one device in a cut model | [04](04_manual_split.ipynb) |
# | star | every rank sends to rank 0, which sends back | [00](00_start_here.ipynb) |
# | strides | every n-th row, not one block of rows | [03](03_ddp.ipynb) |
# | style | an entry of a plan | [06](06_tensor_parallel.ipynb) |
# | tag | a number on a message, by which gloo tells messages apart | [05](05_pipeline_further.ipynb) |
# | temporary buffers | what exists for a moment, such as a gathered unit | [08](08_fsdp.ipynb) |
# | tensor parallelism | every layer cut, each rank with a part of its matrices | [06](06_tensor_parallel.ipynb) |
# | tensor-parallel group | the ranks that share one copy of each layer | [06](06_tensor_parallel.ipynb) |
# | thread | a line of work in a process, which shares its memory with the others | [02](02_data_parallel.ipynb) |
# | throughput | what is delivered in a unit of time | [01](01_factory.ipynb) |
# | tied | of a parameter: used in two places | [03](03_ddp.ipynb) |
# | tied embedding | one matrix as embedding and as head | [04](04_manual_split.ipynb) |
# | top-k | the choice of the k experts with the largest logits | [11](11_experts.ipynb) |
# | torchrun | PyTorch's launcher: it starts a script as many ranks | [03](03_ddp.ipynb) |
# | trace | a run of the real program as one rank, with fake tensors among fake ranks, that notes calls, FLOPs and bytes | [12](12_plan_a_cluster.ipynb) |
# | training step | forward, backward, update | [01](01_factory.ipynb) |
# | Ulysses | context parallelism by all-to-all: for attention, each rank has all tokens of some heads | [10](10_long_context.ipynb) |
# | unified sequence parallelism | Ulysses along one dimension of a mesh of ranks, a ring along the other | [10](10_long_context_further.ipynb) |
# | unit | the layers whose parameters are gathered together, usually one block | [08](08_fsdp.ipynb) |
# | V | a pipeline's line that runs down the ranks and up again: rank 0 has the first stage and the last | [05](05_pipeline_further.ipynb) |
# | value | what a token hands on to those that look at it | [04](04_manual_split.ipynb) |
# | view | a tensor that lies in the memory of another one | [06](06_tensor_parallel.ipynb) |
# | virtual stage | a piece of an interleaved pipeline, counted along the model | [05](05_pipeline_further.ipynb) |
# | vocabulary | all words or characters that a model knows | [06](06_tensor_parallel.ipynb) |
# | W | in a zero-bubble schedule, the half of backward that computes the gradient of the weights | [05](05_pipeline_further.ipynb) |
# | warm-up | the forward passes of a rank before its first backward pass | [05](05_pipeline.ipynb) |
# | worker | a device and the thread that drives it; under torchrun, a rank | [02](02_data_parallel.ipynb) |
# | worker group | all workers that train together: it lives and dies as a whole | [09](09_elastic.ipynb) |
# | world size | how many ranks there are | [00](00_start_here.ipynb) |
# | ZB-H1 | a zero-bubble schedule with 1F1B's memory and a third of its bubble | [05](05_pipeline_further.ipynb) |
# | ZB-H2 | a zero-bubble schedule with no bubble and twice the memory | [05](05_pipeline_further.ipynb) |
# | ZB-V | a zero-bubble schedule on a V: no bubble if F, B and W take equally long, and 1F1B's memory | [05](05_pipeline_further.ipynb) |
# | zero-bubble | of a schedule: backward in two halves, of which one waits until there is a gap | [05](05_pipeline_further.ipynb) |
# | zig-zag | a fair cut under a causal mask: each rank has one chunk from the front and its mirror image from the back | [10](10_long_context.ipynb) |
