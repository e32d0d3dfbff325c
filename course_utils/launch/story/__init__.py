"""What tells why ranks stopped:

view         a rank as the kernel sees it, wherever it is
supervise    the kernel's loop: until all have delivered, one has failed or nothing can move
recorder     each rank's record of its calls, as the rank writes it; calls: as the kernel reads it
matching     what the records prove: which calls meet, and whose call lacks whom
stillness    when ranks wait for each other and nothing can wake them
stacks       where each rank is right now, even inside of a C++ collective
threads      what the threads of a rank can still do: nothing that moves any rank on?
held         ranks that a debugger holds: whose turn it is to talk through the cell
states       what each rank did, in words; frames: with the learner's own lines
diagnosis    who failed first and why: one message for a learner, a RankFailure (failure)
"""
