interface Props {
  readonly title: string;
  readonly rows: readonly (readonly [name: string, value: string])[];
  /** Beside the title. */
  readonly note?: string;
}

/** Names and their values below a title; nothing without rows. */
export function Table({ title, rows, note = "" }: Props) {
  if (rows.length === 0) return null;
  return (
    <section aria-label={title.toLowerCase()}>
      <h3>
        {title} {note && <small>{note}</small>}
      </h3>
      <table>
        <tbody>
          {rows.map(([name, value]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td>{value}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
