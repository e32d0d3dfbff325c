"""What leaves nothing behind, however a call ends:

server       the fork server that has torch in memory already; it leaves when nobody needs it
sockets      where its sockets lie, however long the temporary folder's name
family       processes below others: handles that mean no other process, and orphans
guardian     what the fork server does for all below it, also when the kernel is gone
janitor      ends ranks and jobs, and removes folders, when the kernel itself is killed
interrupts   what an interrupt must not break off
"""
