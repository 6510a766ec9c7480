"""Bugs in what makes a Slurm out of machines."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "health_check_takes_the_word_of_others_away",
        "cluster/render.py",
        "in *DOWN* | *DRAIN*) exit 1 ;; esac ;;",
        "in *NEVER*) exit 1 ;; esac ;;",
        "P3: `Kill task failed` stands until a person has looked",
        ("cluster",),
    ),
    Mutant(
        "health_check_resumes_beside_what_did_not_die",
        "cluster/render.py",
        '    left=$(unkilled) || wrong "it is not known whether something of a job that is over lives"\n',
        "    left=\n",
        "P3: a node is not resumed unseen",
        ("cluster",),
    ),
    Mutant(
        "health_check_looks_at_first_threads_alone",
        "cluster/render.py",
        "-path '/proc/*/*' ! -path '/proc/*/task*' -prune",
        "-path '/proc/*/task' -prune",
        "P3: a process whose first thread has ended may have another that does not die",
        ("cluster",),
    ),
    Mutant(
        "health_check_resumes_when_it_could_not_look",
        "cluster/render.py",
        "print job; exit failed || !seen }}",
        "print job }}",
        "P3: a node is not resumed unseen",
        ("cluster",),
    ),
    Mutant(
        "health_check_looks_at_any_cgroup_of_a_jobs_name",
        "cluster/render.py",
        "/([^/]*_)?slurmstepd[.]scope/job_[0-9]+/|/slurm[^/]*/uid_[0-9]+/job_[0-9]+/",
        "/job_[0-9]+/",
        "P8: nobody keeps a node away by a name of a control group",
        ("cluster",),
    ),
    Mutant(
        "health_check_looks_into_users_own_cgroups",
        "cluster/render.py",
        '      sub("/user@.*", "")\n',
        "",
        "P8: nobody keeps a node away by a name of a control group",
        ("cluster",),
    ),
    Mutant(
        "health_check_resumes_when_slurm_did_not_answer",
        "cluster/render.py",
        "completing -o %A) || return 1",
        "completing -o %A) || return 0",
        "P3: a node is not resumed unseen",
        ("cluster",),
    ),
    Mutant(
        "health_check_asks_for_jobs_anywhere",
        "cluster/render.py",
        'squeue -h -w "$node" -t',
        "squeue -h -t",
        "P3: a job that was queued again runs elsewhere, and what it left lives here",
        ("cluster",),
    ),
)
