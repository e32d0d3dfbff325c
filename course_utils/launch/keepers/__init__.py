"""What leaves nothing behind, however a call ends:

server       the kernel's hold on the fork server, which leaves when nobody needs it
forks        the fork server itself: forks ranks, and ends all below it, also when the kernel is gone
sockets      where the ranks' sockets lie, however long the temporary folder's name
family       processes below others, and orphans
janitor      ends ranks and jobs, and removes folders, when the kernel itself is killed; handles of
             processes, which mean no other one
"""
