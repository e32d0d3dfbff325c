"""What starts ranks, runs them and gives back what they return, in the order of a call:

launching    the call itself: check, start, watch, explain, clean up
elsewhere    who starts the ranks instead, where they are not on this machine
arguments    what launch accepts, and one sentence for everything else
job          what a rank needs to know: of its call, and of the host that it is on
packing      functions, arguments and results as bytes; tensors beside the pickle stream
unpicklable  which argument, or which variable of the function, cannot be sent
process      a rank on this machine, as the kernel has it: start, read, end
rank         a rank as it sees itself: join the group, run the function, report
script       what makes a script for torchrun run in a rank as it does there, and runs it (`run`)
report       what a rank that does not return tells of its exception; values: its variables in words
peers        no message to a rank that is not there
output       what the ranks print, in an order that is the same in every run
live         what a person sees of them meanwhile; cells: where, under a notebook's cell
debugger     pdb in a rank, through the cell
figures      what the ranks draw: shown under the cell (figure_backend: Matplotlib's side)
preloaded    what the fork server does once for all ranks; huge_pages: why it forks in 2 ms
"""
